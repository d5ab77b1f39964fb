"""docs/configuration.md says what the schema says."""

from configs.document import DOCUMENT, markdown
from configs.keys import all_keys


def test_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == markdown(), "run `python -m configs.document`"


def test_every_key_has_a_meaning() -> None:
    assert [key.path for key in all_keys() if not key.meaning and not key.path.endswith(".NAME")] == []


def test_every_key_is_in_the_document() -> None:
    text = DOCUMENT.read_text()

    assert [key.path for key in all_keys() if f"`{key.path}`" not in text] == []
