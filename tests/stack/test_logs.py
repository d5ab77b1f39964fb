"""Log files of services."""

from pathlib import Path

from workers.stack.logs import open_log, tail


def test_a_restart_appends_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "one.log"
    for text in (b"first\n", b"second\n"):
        with open_log(path, "start one") as log:
            log.write(text)
    assert [line.split()[0] for line in path.read_text().splitlines()] == ["---", "first", "---", "second"]


def test_a_large_log_is_moved_aside_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "one.log"
    path.write_text("x" * 100)
    open_log(path, "start one", max_bytes=99).close()
    assert (tmp_path / "one.log.1").read_text() == "x" * 100
    assert path.read_text().endswith("start one\n")


def test_tail_gives_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "one.log"
    path.write_text("a\nb\nc\n")
    assert tail(path, 2) == "b\nc"
    assert tail(path, 0) == ""
    assert tail(tmp_path / "none.log", 5) == ""
