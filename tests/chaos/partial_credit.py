"""A reward that is coarse enough for some groups to agree in it, and fine enough for most not to."""


def reward(completion: str, answer: str) -> float:
    """0, 0.5 or 1, by how many letters stand where they should."""
    right = sum(one == two for one, two in zip(completion, answer, strict=False))
    return round(2 * right / len(answer)) / 2
