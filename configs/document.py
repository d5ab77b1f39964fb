"""docs/configuration.md, made from the schema.

`python -m configs.document` writes it; a test fails when it is stale.
"""

from pathlib import Path

from configs import keys
from configs.load import RECIPES, packaged_recipes

DOCUMENT = Path(__file__).parent.parent / "docs" / "configuration.md"

_HEAD = """\
# Configuration

<!-- Made by `python -m configs.document` from the schema in configs/. Do not edit. -->

A run is described by a *recipe*: one YAML file with the sections below. Only `run.model` and `run.dataset` are
required; every other key has a default. Names and defaults are those of NeMo-RL wherever the same thing exists there.

```console
$ onbelay config validate my_recipe.yaml      # every problem at once; exit code 2 if there is one
$ onbelay config show my_recipe.yaml          # all keys with their values, secrets hidden
$ onbelay config schema                       # JSON schema, for editors; --markdown prints this page
```

## Overrides

Every command that takes a recipe also takes `key=value` settings after it. Keys are dotted, values are YAML, and the
last one wins:

```console
$ onbelay run start swe_lite run.model=models/Qwen3-0.6B grpo.num_prompts_per_step=8 training.lr=3e-6
$ onbelay run start swe_lite 'generation.endpoints=[http://vllm-0:8000, http://vllm-1:8000]'
$ onbelay run start swe_lite 'failure={max_skipped_prompts: 8, on_dropped_prompt: park}'
```

* A whole block, list or mapping can be set at once; it replaces what the file says there.
* `null`, or nothing after the `=`, unsets a key that may be null.
* Text and path keys take the value as it stands: `run.id=0042` is the name 0042.
* A key that does not exist is an error that names the nearest one that does. A key given twice in a file is an error.

## Secrets

`storage.dsn` and `temporal.api_key` may refer to environment variables, so that no recipe holds a secret:
`dsn: ${ONBELAY_DSN}`, or `dsn: postgresql://onbelay:${PG_PASSWORD}@db/onbelay`. A variable that is not set is an error.
`$${` stands for `${` itself. Other keys are taken as they stand.

## Paths

Relative paths are relative to the folder in which `onbelay` is started.
"""


def markdown() -> str:
    """The whole page."""
    return "\n".join([_HEAD, _recipes(), *(_section(key) for key in keys.all_keys() if "." not in key.path)])


def _recipes() -> str:
    lines = ["## Recipes that come with Onbelay", ""]
    for name in packaged_recipes():
        comment: list[str] = []
        for line in (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines():
            if not line.startswith("# ") or line.startswith("#   "):
                break
            comment.append(line.removeprefix("# "))
        lines.append(f"* `{name}`: {_first_sentence(' '.join(comment))}")
    return "\n".join([*lines, ""])


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".:") + "."


def _section(section: keys.Key) -> str:
    lines = [f"## `{section.path}`", "", section.meaning, "", "| key | type | default | meaning |", "|---|---|---|---|"]
    for key in keys.all_keys():
        if key.path.startswith(f"{section.path}."):
            default = f"`{key.default}`" if key.default and key.default != "required" else key.default
            expected = key.expected.removeprefix("a ").removeprefix("an ")
            lines.append(f"| `{key.path}` | {_cell(expected)} | {_cell(default)} | {_cell(key.meaning)} |")
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    DOCUMENT.write_text(markdown(), encoding="utf-8")
