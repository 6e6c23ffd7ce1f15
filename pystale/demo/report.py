"""The report at the end of a run, and the figures shown on the way, as text."""

from collections import Counter

import numpy as np

from pystale.demo.record import Record

__all__ = ["groups_text", "outcome", "progress", "report", "share", "spread"]


def share(part: float, whole: float) -> str:
    """Percentage, with one decimal."""
    return f"{100 * part / whole if whole else 0:.1f} %"


def spread(counts: "Counter[int]", largest: int = 3) -> str:
    """Shares of a histogram, with all from `largest` on in one: ``0: 71.0 %  1: 22.0 %  3+: 7.0 %``.

    Negative ones are ``ahead``: what a process that was killed generated with weights that were not saved.
    """
    total = sum(counts.values())
    bins: Counter[str] = Counter()
    for value, count in sorted(counts.items()):
        bins["ahead" if value < 0 else str(value) if value < largest else f"{largest}+"] += count
    return "   ".join(f"{value}: {share(count, total)}" for value, count in bins.items())


def progress(record: Record) -> str:
    """One line about the run so far."""
    recent = record.rewards[-max(record.settings.steps // 20, 1) :]
    width = len(str(record.settings.steps))
    line = f"step {record.steps:{width}}/{record.settings.steps}  reward {np.mean(recent):.2f}  "
    if record.settings.mode != "sync":
        line += (
            f"masked {share(record.masked, 1):>6}  expired {record.groups_expired}  rerolled {record.groups_rerolled}  "
        )
    if record.refreshes:
        line += f"refresh {np.median(record.refresh_us):.0f} us  "
    if record.settings.mode == "disaggregated":
        line += f"beside training {share(record.tokens_beside_training, record.generated_tokens)}  "
    return line + f"{record.seconds:.1f} s"


def outcome(record: Record) -> str:
    """What became of the reward, with no claim where there is too little to compare."""
    tenths = record.tenths()
    if tenths is None:
        return f"mean {np.mean(record.rewards):.3f}" if record.steps else "no step was trained"
    first, last = tenths
    return f"first tenth {first:.3f} -> last tenth {last:.3f} ({last / max(first, 1e-9):.1f}x)"


def groups_text(record: Record) -> str:
    """What became of groups on their way."""
    return (
        f"{record.groups_expired:,} expired, {record.groups_rerolled:,} re-rolled, "
        f"{record.groups_continued:,} continued"
    )


def report(record: Record) -> list[tuple[str, str]]:
    """Lines of the report: what, and its figures."""
    rows = [("reward", outcome(record))]
    if record.continued_after:
        steps = ", ".join(map(str, record.continued_after))
        rows.append(("continued", f"{len(record.continued_after)} times, after step {steps}"))
    if record.ledger:
        rows += account(record)
    if record.staleness:
        rows.append(("staleness when taken", spread(record.staleness)))
        rows.append(("versions per response", spread(record.versions)))
    if record.ledger and (record.settings.mode != "sync" or record.groups_continued):
        rows.append(("groups", groups_text(record)))
    if record.refreshes:
        p50, p99 = np.percentile(record.refresh_us, [50, 99])
        synced = ", waiting for the disk included" if record.checkpoints else ""
        rows.append(("refresh", f"p50 {p50:.0f} us, p99 {p99:.0f} us, max {max(record.refresh_us):.0f} us{synced}"))
        idle = [us for us, expired in record.refreshes if not expired]
        if 0 < len(idle) < len(record.refreshes):
            rows.append(
                ("  with nothing due", f"p50 {np.median(idle):.0f} us, in {len(idle)} of {len(record.refreshes)}")
            )
    if record.checkpoints:
        rows.append(
            ("checkpoints", f"{len(record.checkpoints)}, p50 {1e3 * float(np.median(record.checkpoints)):.0f} ms each")
        )
    if record.ledger:
        rows.append(("longest loop gap", f"{record.longest_gap_ms:.1f} ms between two heartbeats 5 ms apart"))
    rows.append(("time", f"{record.seconds:.1f} s{times(record)}"))
    return rows


def account(record: Record) -> list[tuple[str, str]]:
    """Where the tokens went, which is the buffer's ledger."""
    ledger = record.ledger
    produced = ledger["produced"]
    uses = [("trained", ledger["trained"]), ("masked as stale", ledger["masked_stale"])]
    uses += [("masked by the task", ledger["masked_semantic"])] if ledger["masked_semantic"] else []
    uses += [(f"discarded, {reason}", count) for reason, count in sorted(ledger["discarded"].items())]
    uses += [("still in the buffer", ledger["stored"]), ("in flight", ledger["in_flight"])]
    accounted = sum(count for _, count in uses)
    rows = [("tokens generated", f"{produced:>11,}   {record.tokens_per_s:,.0f} per second while generating")]
    if record.settings.mode == "disaggregated":
        beside = record.tokens_beside_training
        rows.append(("  beside training", f"{beside:>11,} {share(beside, record.generated_tokens):>8}"))
    rows += [("  " + use, f"{count:>11,} {share(count, produced):>8}") for use, count in uses]
    rows.append(("  sum", f"{accounted:>11,}   {'balances' if accounted == produced else 'DOES NOT BALANCE'}"))
    return rows


def times(record: Record) -> str:
    """What the time of a run was spent on."""
    if not record.steps:
        return ""
    if record.settings.mode == "disaggregated":
        return (
            f": {record.training_s:.1f} s training, {record.waiting_s:.1f} s waiting for batches; the engine "
            f"paused {record.pausing_s:.1f} s"
        )
    return f": {record.generation_s:.1f} s generating and {record.training_s:.1f} s training, in turn"
