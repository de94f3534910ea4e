"""Writes docs/run-file.md from shared/config.py, so that the page and the type cannot drift (tests/shared/test_docs.py)."""

import typing
from pathlib import Path

from pydantic_core import PydanticUndefined

from shared import config
from shared.config import RunConfig, Section

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
    lines += [
        f"## {path.rstrip('.') or 'Top level'}",
        "",
        "| field | type | default | meaning |",
        "| --- | --- | --- | --- |",
    ]
    nested = []
    for name, field in model.model_fields.items():
        if path == "" and name == "base":
            continue
        section = config._section_of(field.annotation)
        if section:
            nested.append((section, f"{path}{name}."))
            kind = f"section{'s (list)' if typing.get_origin(field.annotation) is list else ''}"
        else:
            kind = _type(field.annotation)
        lines.append(f"| `{path}{name}` | {kind} | {_default(field)} | {' '.join((field.description or '').split())} |")
    lines.append("")
    for section, below in nested:
        _section(section, below, lines)


def _type(annotation: typing.Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(annotation))
    name = annotation.__name__ if isinstance(annotation, type) and not typing.get_args(annotation) else str(annotation)
    return name.replace("typing.", "").replace("|", "or").replace("NoneType", "None")


def _default(field: typing.Any) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, Section):
        return ""
    return f"`{field.default}`"


if __name__ == "__main__":
    PAGE.write_text(render())
