"""When to plan the step behind the one that is being computed.

What comes while a step computes, a sequence handed over or a prompt, becomes part of the next one if that has not been
planned yet; else it waits for all of that too. So the next step is planned late: just before the device would be free,
by how long steps like this one have taken so far, and by how long planning and launching takes the host. Where too
little is known it is planned at once.

Estimates are low: of steps of about the same size, nearly the shortest. And a step that had ended before the next was
launched makes those of its kind more cautious: a device that waits for the host costs more than what comes may gain.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.engine.plan import StepPlan

SHARE = 0.1  # of a step's expected time that is kept in hand
SLACK_S = 0.5e-3  # and this: threads wake late
LEAST_SEEN = 3  # steps of a kind before any is expected to take as long
GROWTH = 1.02  # by how much the next step may be expected to take longer than the last
FALL = 0.5  # and shorter: behind a pause of the host a step seems to have taken next to no time
FORGOTTEN = 0.02  # a host that was slow once is taken for as much faster with each further step
WARY, CALM, MOST_CAUTION = 1.5, 0.998, 8.0  # what a step makes of the caution: one that was late, one that was not

Kind = tuple[str, int]


@dataclass(slots=True)
class _Steps:
    """Those of one kind: the last's `size` and, on the low side, `seconds`; what each takes the host; the caution."""

    seen: int = 0
    size: int = 0
    seconds: float = 0.0
    host_s: float = 0.0
    caution: float = 1.0

    def expected(self, size: int) -> float:
        return self.seconds * min(1.0, size / self.size)


@dataclass(slots=True)
class Ahead:
    """Learns how long steps take, and says when the next is due. All times are in seconds of one clock."""

    _kinds: dict[Kind, _Steps] = field(default_factory=dict)

    def due(self, plan: StepPlan, begun: float) -> float:
        """When to plan what comes behind `plan`, which the device has been computing since `begun`."""
        steps = self._of(plan)
        if steps.seen < LEAST_SEEN:
            return begun
        expected = steps.expected(len(plan.token_ids))
        return begun + expected - SHARE * expected - steps.caution * (steps.host_s + SLACK_S)

    def launched(self, plan: StepPlan, host_s: float) -> None:
        """Planning and launching `plan` has taken the host so long."""
        steps = self._of(plan)
        steps.host_s = max(host_s, steps.host_s + FORGOTTEN * (host_s - steps.host_s))

    def ended(self, plan: StepPlan, seconds: float, *, late: bool) -> None:
        """`plan` took `seconds`; `late` says that it had ended when what comes behind it was launched."""
        steps, size = self._of(plan), len(plan.token_ids)
        if steps.seen:
            expected = steps.expected(size)
            seconds = min(seconds, GROWTH * expected)
            if steps.seen >= LEAST_SEEN:
                seconds = max(seconds, FALL * expected)
        steps.seconds = seconds
        steps.seen, steps.size = steps.seen + 1, size
        steps.caution = min(MOST_CAUTION, steps.caution * WARY) if late else max(1.0, steps.caution * CALM)

    def _of(self, plan: StepPlan) -> _Steps:
        return self._kinds.setdefault(_kind(plan), _Steps())


def _kind(plan: StepPlan) -> Kind:
    """Steps that only decode, that only compute prompts, that do both, each by its size to a power of two."""
    tokens = len(plan.token_ids)
    if tokens == plan.sequences:
        return "decode", tokens.bit_length()
    return "mixed" if plan.decodes else "prompts", tokens.bit_length()
