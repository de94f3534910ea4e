"""Writes docs/run-file.md from shared/config.py, so that the page and the type cannot drift (tests/shared/test_docs.py)."""

import typing
from pathlib import Path

from pydantic_core import PydanticUndefined

from shared.algorithms import BY_NAME, MEMBERS, PolicyOptions
from shared.config import RunConfig, Section, sections_of

PAGE = Path(__file__).with_name("run-file.md")

INTRODUCTION = """\
# The run file

One YAML file describes a run. `slipstream validate RUN.yaml` checks all of it without a GPU; an unknown key or a wrong type
is refused with the field's path and a hint. `--set a.b=value` on the command line overrides a field. Relative paths are relative
to the run file (`workdir`: to where the command is typed), and plug-ins (rewards, prompt sources, demonstrations) are plain
functions named by dotted path, looked for beside the run file.

A complete example: [examples/sort_letters/run.yaml](../examples/sort_letters/run.yaml). What the staleness fields mean:
[staleness.md](staleness.md). This page is written by `docs/make_run_file.py`.
"""


def render() -> str:
    lines = [INTRODUCTION]
    _section(RunConfig, "", lines)
    return "\n".join(lines)


def _section(model: type[Section], path: str, lines: list[str]) -> None:
    _heading(path.rstrip(".") or "Top level", lines)
    nested = []
    for name, field in model.model_fields.items():
        if (path == "" and name == "base") or (model is PolicyOptions and name == "name"):
            continue
        sections = sections_of(field.annotation)
        if sections:
            nested.append((sections, f"{path}{name}."))
        lines.append(_row(f"{path}{name}", field))
    lines.append("")
    for sections, below in nested:
        if len(sections) == 1:
            _section(sections[0], below, lines)
        else:
            _algorithms(below, lines)


def _algorithms(path: str, lines: list[str]) -> None:
    """What all algorithms have, once; then of each what it adds and which defaults of its own it has."""
    shared = PolicyOptions.model_fields
    names = ", ".join(f"`{name}`" for name in BY_NAME)
    lines += [
        f"`{path}name` is one of {names}.",
        "Without it: `grpo`. [algorithms.md](algorithms.md) has the formulas. First what all",
        "of them have, then of each what it adds and where its default is another.",
        "",
    ]
    _section(PolicyOptions, path, lines)
    for member in MEMBERS:
        fields = member.model_fields
        title = f"{path}name: {fields['name'].default}"
        lines += [f"## {title}", "", " ".join((fields["name"].description or "").split()), ""]
        own = {name: field for name, field in fields.items() if name != "name" and field is not shared.get(name)}
        rows = [_row(f"{path}{name}", field) for name, field in own.items() if _differs(field, shared.get(name))]
        if rows:
            lines += [*COLUMNS, *rows, ""]


def _differs(field: typing.Any, general: typing.Any) -> bool:
    return general is None or field.default != general.default or field.description != general.description


COLUMNS = ("| field | type | default | meaning |", "| --- | --- | --- | --- |")


def _heading(title: str, lines: list[str]) -> None:
    lines += [f"## {title}", "", *COLUMNS]


def _row(path: str, field: typing.Any) -> str:
    if sections_of(field.annotation):
        kind = f"section{'s (list)' if typing.get_origin(field.annotation) is list else ''}"
    else:
        kind = _type(field.annotation)
    meaning = " ".join((field.description or "").split()).replace("|", "\\|")
    return f"| `{path}` | {kind} | {_default(field)} | {meaning} |"


def _type(annotation: typing.Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(annotation))
    name = annotation.__name__ if isinstance(annotation, type) and not typing.get_args(annotation) else str(annotation)
    return name.replace("typing.", "").replace("|", "or").replace("NoneType", "None")


def _default(field: typing.Any) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, Section):
        usual = type(field.default).model_fields
        return ", ".join(f"`{name}: {value}`" for name, value in field.default if value != usual[name].default)
    return f"`{field.default}`"


if __name__ == "__main__":
    PAGE.write_text(render())
