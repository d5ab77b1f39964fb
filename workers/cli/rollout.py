"""`onbelay rollout show`: the transcript of one attempt, turn by turn, as the ledger has it."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from tokenizers import Tokenizer

from configs.recipe import Recipe
from storage.transcripts import Transcript, TranscriptTurn
from workers.cli import exits
from workers.cli.options import AsJson, Where
from workers.cli.session import session
from workers.cli.tables import new_console

MAX_TEXT_CHARS = 600  # of one prompt or reply on the screen; --json has everything
_COLORS = {"generated": "green", "replayed": "cyan", "measured": "dim", "reported": "green"}


def register(app: typer.Typer) -> None:
    """Add the `rollout` commands."""
    group = typer.Typer(no_args_is_help=True, help="Look into rollouts.")
    group.command("show")(show)
    app.add_typer(group, name="rollout")


def show(
    rollout_id: Annotated[
        str, typer.Argument(metavar="ROLLOUT", help="Rollout id, for instance RUN/step-3/group-0/rollout-2.")
    ],
    attempt: Annotated[
        int | None, typer.Option(min=0, help="Attempt; without one, the attempt that settled the rollout.")
    ] = None,
    recipe: Where = None,
    as_json: AsJson = False,
) -> None:
    """Show the model calls of an attempt: what was selected, replayed, failed or abandoned, and its segments."""

    async def command() -> None:
        async with session(recipe) as opened:
            transcript = await opened.ledger.transcripts.of(rollout_id, attempt)
            run = await opened.ledger.runs.get(rollout_id.split("/")[0])
        if as_json:
            typer.echo(transcript.model_dump_json(indent=2))
        else:
            print_transcript(new_console(), transcript, _tokenizer(Recipe.model_validate(run.recipe).run.model))

    exits.run(command())


def print_transcript(console: Console, transcript: Transcript, tokenizer: Tokenizer | None) -> None:
    """One block a turn. Without a tokenizer, prompts are shown by their size only."""
    rollout, attempt = transcript.rollout, transcript.attempt
    reward = "" if rollout.reward is None else f"  reward {rollout.reward:.3f}"
    why = f"  ({rollout.reason})" if rollout.reason else ""
    _say(console, f"[bold]{escape(rollout.rollout_id)}[/]  {rollout.state}{reward}{escape(why)}")
    start = f"fresh: {attempt.fresh_reason}" if attempt.fresh_reason else f"sample {attempt.sample}"
    _say(console, f"attempt {attempt.attempt} of {len(rollout.attempts)}  {attempt.state}  {escape(start)}")
    if attempt.failure_class:
        _say(console, f"[red]{escape(f'{attempt.failure_class}: {attempt.cause}')}[/]")
    segment: int | None = None
    for turn in transcript.turns:
        if turn.segment is not None and turn.segment != segment:
            segment = turn.segment
            reason = f": {turn.boundary}" if turn.boundary else ""
            _say(console, f"[bold]── segment {segment}{escape(reason)} ──[/]")
        _print_turn(console, turn, tokenizer)


def _print_turn(console: Console, turn: TranscriptTurn, tokenizer: Tokenizer | None) -> None:
    color = _COLORS.get(turn.outcome, "red")
    source = f" from attempt {turn.replayed_from}" if turn.replayed_from is not None else ""
    parts = [f"[{color}]{turn.outcome}{source}[/]", "selected" if turn.selected else "not selected"]
    if turn.prompt_tokens:
        parts.append(f"{turn.prompt_tokens} prompt + {turn.generated_tokens} sampled tokens")
    parts += [", ".join(turn.versions)] if turn.versions else []
    parts += [turn.finish_reason] if turn.finish_reason else []
    parts += [f"{turn.seconds:.2f} s"] if turn.seconds is not None else []
    _say(console, f"#{turn.ordinal}  {'  '.join(parts)}")
    if turn.failure:
        _say(console, f"   [red]{escape(turn.failure)}[/]")
    if tokenizer is not None and turn.new_token_ids:
        _say(
            console, f"   [dim]read[/]  {_text(tokenizer.decode(list(turn.new_token_ids), skip_special_tokens=False))}"
        )
    if tokenizer is not None and turn.sampled_token_ids:
        said = tokenizer.decode(list(turn.sampled_token_ids), skip_special_tokens=False)
        _say(console, f"   [dim]said[/]  {_text(said)}")
    elif turn.message is not None:
        _say(console, f"   [dim]said[/]  {_text(json.dumps(turn.message))}")


def _text(text: str) -> str:
    """Foreign text in one bounded, harmless piece: no markup, no control characters."""
    line = "".join(char if char.isprintable() else " " for char in " ".join(text.split()))
    return escape(line if len(line) <= MAX_TEXT_CHARS else f"{line[:MAX_TEXT_CHARS]}… ({len(line)} characters)")


def _tokenizer(model: Path) -> Tokenizer | None:
    """The policy's own tokenizer, where its folder can be seen from here."""
    file = model / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, highlight=False)
