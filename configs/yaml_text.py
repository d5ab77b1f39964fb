"""YAML as recipes use it: a key is given only once, dates stay text, and a mistake is named with line and column."""

from typing import Any

import yaml


class YamlMistake(Exception):
    """Text that is not YAML, or gives a key twice."""


class _Loader(yaml.SafeLoader):
    """The safe loader, without dates (`run.id: 2030-01-01` is a name) and without repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a second key of the same name, which YAML would let win silently."""
        first_lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in first_lines and key.tag != "tag:yaml.org,2002:merge":
                raise YamlMistake(
                    f"the key `{key.value}` is given twice, in line {first_lines[key.value]} "
                    f"and in line {key.start_mark.line + 1}: keep one of them"
                )
            first_lines[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse(text: str) -> Any:
    """The value of one YAML document."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise YamlMistake(f"{where}{error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise YamlMistake(str(error).replace("\n", " ")) from error


def dump(value: Any) -> str:
    """YAML of plain values, keys in the given order."""
    # types-PyYAML leaves `width` untyped, so that strict checking does not know the function at all.
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120)  # pyright: ignore[reportUnknownMemberType]
    return text
