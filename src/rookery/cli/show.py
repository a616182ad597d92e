"""`rookery show`: show a run, a page of its rollouts, or one rollout in detail.

Guarantees:
- it only reads the run, and works while the run is running; `--follow` prints every rollout once until the run
  ends;
- control characters in recorded text are escaped, so that the text cannot control the terminal.

A page of rollouts is loaded at a time, so memory does not grow with the run.
"""

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import click
import msgspec

from rookery.cli.config import find_runs_folder, read_prices, runs_option
from rookery.cli.options import PRICES, Number, option
from rookery.core import UsageError

if TYPE_CHECKING:
    from rookery.core import Rollout
    from rookery.journal import RunReader

_HELP = """Show the summary of RUN and a page of its rollouts.

With ROLLOUT (an ID such as 12.3), show its transcript, tokens, timings, attempts and failure.
With the number of a group (12), show the rollouts of that group.

RUN is a directory, its name, the start or end of its name, or `latest`.
"""


@click.command(help=_HELP, short_help="Show a run, or one of its rollouts.")
@click.argument("name", metavar="RUN")
@click.argument("rollout", metavar="[ROLLOUT]", required=False)
@option("--failed", is_flag=True, help="Only rollouts that failed.")
@option("--label", metavar="L", help="Only rollouts with this outcome: completed, truncated.time, sandbox.lost, …")
@option("--task", metavar="ID", help="Only rollouts of this task.")
@option("--environment", metavar="NAME", help="Only rollouts of this environment of a mixture.")
@option("-n", "count", type=Number(int, 1), default=20, help="Rollouts per page.")
@option("--page", metavar="P", type=Number(int, 1), default=1, help="Page number.")
@option("--tokens", is_flag=True, help="With ROLLOUT: token IDs and log probabilities.")
@option("--full", is_flag=True, help="With ROLLOUT: do not shorten long texts.")
@option("--follow", is_flag=True, help="Print rollouts as they end, until the run ends.")
@PRICES
@option("--json", is_flag=True, help="Print JSON.")
@runs_option
def show(name: str, rollout: str | None, root: str | None, json: bool, **values: Any) -> int:
    from rookery.journal import RunReader, find_journal

    if rollout is not None and values["follow"]:
        raise UsageError("--follow shows a whole run, not one rollout: remove the rollout's ID or --follow")
    with RunReader(find_journal(name, find_runs_folder(root))) as reader:
        if values["follow"]:
            return _follow_run(reader, json)
        if rollout is not None and not rollout.isdecimal():
            return _show_rollout(reader, rollout, json, tokens=values["tokens"], full=values["full"])
        return _show_page(reader, rollout, json, values)


# ---- a run


def _show_page(reader: "RunReader", group: str | None, json: bool, values: dict[str, Any]) -> int:
    from rookery.cli.summary import format_next_steps, format_settings, format_summary
    from rookery.cli.terminal import bold, dim, program_name, shell_quote
    from rookery.view.stats import summarize_rollout
    from rookery.view.summary import read_summary

    if values["label"]:
        _check_label(reader, values["label"])
    chosen = _filter_rollouts(reader, group, values)
    start = (values["page"] - 1) * values["count"]
    found = list(islice(chosen, start, start + values["count"] + 1))
    page, more = found[: values["count"]], len(found) > values["count"]
    filtered = group is not None or any(values[name] for name in ("failed", "label", "task", "environment"))
    summary = read_summary(reader, prices=read_prices(values["prices"]) if values["prices"] else None)
    if not page and (filtered or start):
        raise _explain_empty_page(reader, group, values)
    if json:
        rollouts = [summarize_rollout(record) for record in page]
        click.echo(msgspec.json.encode({**summary.plain(), "page": values["page"], "rollouts_shown": rollouts}))
        return 0
    lines = [] if filtered else [*format_summary(summary), *format_settings(summary), ""]
    lines += _format_rollouts(page) if page else ["no rollouts yet"]
    click.echo("\n".join(lines))
    if more:
        click.echo(dim(f"more with --page {values['page'] + 1}"), err=True)
    if not filtered and summary.left and summary.status not in ("running", "finished"):
        click.echo("\n".join(format_next_steps(summary)[:3]), err=True)
    elif page:
        click.echo(
            f"\n{dim('one of them:')} {bold(f'{program_name()} show {shell_quote(reader.folder)} {page[0].id}')}",
            err=True,
        )
    return 0


def _check_label(reader: "RunReader", label: str) -> None:
    labels = reader.labels()
    if label not in labels:
        from rookery.core.errors import suggestion

        known = f"its labels are {', '.join(labels)}" if labels else "it has no rollouts yet"
        near = suggestion(label, labels)
        raise UsageError(f"no rollout of {reader.folder.name} has the label {label!r}{near or f'; {known}'}")


def _explain_empty_page(reader: "RunReader", group: str | None, values: dict[str, Any]) -> UsageError:
    """Return an error that says why a page is empty: it is after the last page, or no rollout matches."""
    run = reader.folder.name
    matching = sum(1 for _ in _filter_rollouts(reader, group, values))
    if matching:
        pages = -(-matching // values["count"])
        what = f"{matching:,} rollout{'s' if matching > 1 else ''} on {pages:,} page{'s' if pages > 1 else ''}"
        return UsageError(f"no page {values['page']:,} of {run}: it has {what} of {values['count']}")
    wanted = [f"of group {group}"] if group is not None else []
    wanted += [f"of task {values['task']!r}"] if values["task"] else []
    wanted += [f"of the environment {values['environment']!r}"] if values["environment"] else []
    wanted += [f"with the label {values['label']!r}"] if values["label"] else []
    wanted += ["that failed"] if values["failed"] else []
    return UsageError(f"{run} has no rollouts {' and '.join(wanted) or 'yet'}")


def _filter_rollouts(reader: "RunReader", group: str | None, values: dict[str, Any]) -> "Iterator[Rollout]":
    from rookery.core import Failed, label

    for record in reader.iter_rollouts():
        if group is not None and record.group != int(group):
            if record.group > int(group):
                return
            continue
        if values["failed"] and not isinstance(record.outcome, Failed):
            continue
        if values["label"] and label(record.outcome) != values["label"]:
            continue
        if values["task"] and record.task != values["task"]:
            continue
        if values["environment"] and record.environment != values["environment"]:
            continue
        yield record


def _format_rollouts(records: "list[Rollout]") -> list[str]:
    from rookery.cli.terminal import dim, format_table

    head = [dim(word) for word in ("rollout", "task", "ended", "reward", "turns", "tokens", "seconds", "")]
    return format_table([head, *(_format_row(record) for record in records)], right=frozenset({3, 4, 5, 6}))


def _format_row(record: "Rollout") -> list[str]:
    from rookery.cli.terminal import bold, one_line
    from rookery.core import Failed, label

    outcome, usage, timing = record.outcome, record.usage, record.timing
    failed = isinstance(outcome, Failed)
    more = f"{len(record.attempts)} attempts  " if len(record.attempts) > 1 else ""
    return [
        bold(record.id),
        one_line(record.task, 32),
        click.style(one_line(label(outcome), 32), fg="red" if failed else None),
        f"{record.reward:.4g}" if record.reward is not None else "ungraded" if record.ungraded else "-",
        f"{usage.turns}",
        f"{usage.sampled_tokens:,}",
        f"{timing.setup + timing.run + timing.score:.2f}",
        more + (one_line(outcome.detail, 80) if isinstance(outcome, Failed) else ""),
    ]


def _follow_run(reader: "RunReader", json: bool) -> int:
    from rookery.cli.terminal import dim, one_line
    from rookery.cli.transcript import format_event
    from rookery.core import Rollout
    from rookery.view.stats import summarize_rollout

    for item in reader.follow():
        if isinstance(item, Rollout):
            if json:
                click.echo(msgspec.json.encode({"event": "rollout", **summarize_rollout(item)}))
            else:
                click.echo("  ".join(cell for cell in _format_row(item) if cell))
        elif json:
            click.echo(
                msgspec.json.encode({"event": "event", "ts": item.ts, "kind": item.kind, "data": item.payload})
            )
        else:
            who = one_line(str(item.payload.get("attempt", "")), 40)
            click.echo(dim("  ".join(part for part in (item.kind, who, format_event(item, 160)) if part)))
    return 0


# ---- a rollout


def _show_rollout(reader: "RunReader", rollout: str, json: bool, *, tokens: bool, full: bool) -> int:
    from rookery.cli.transcript import print_rollout

    record = reader.rollout(rollout)
    if record is None:
        raise UsageError(
            f"{reader.folder.name} has no record of a rollout {rollout!r}: "
            f"`rookery show {reader.folder.name}` lists them, by group and member (12.3)"
        )
    if json:
        from rookery.core import label
        from rookery.journal.export import row

        events = [{"ts": one.ts, "kind": one.kind, "data": one.payload} for one in reader.events_of(record.id)]
        earlier = [
            {"ts": one.ts, "reason": one.reason, "label": label(one.record.outcome), "reward": one.record.reward}
            for one in reader.earlier(record.id)
        ]
        found = {**row(reader, record, tokens=tokens), "events": events, "earlier": earlier}
        click.echo(msgspec.json.encode(found))
    else:
        print_rollout(reader, record, tokens=tokens, full=full)
    return 0
