"""From what was seen to causes: which happened first, how likely each is, what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsv4doctor.diagnose.args import LoggedLaunch, logged_launch
from dsv4doctor.diagnose.facts import LogFacts, read_facts
from dsv4doctor.diagnose.lines import Line
from dsv4doctor.diagnose.scan import Observation, Sighting, Tally, is_last
from dsv4doctor.diagnose.signature import CONSEQUENCE, Cause, Signature
from dsv4doctor.models import Severity

HIGH, MEDIUM = 0.75, 0.4
_FOLLOW_ON = 4000
_SEVERITIES = (Severity.ERROR, Severity.WARNING, Severity.INFO)
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class RankedCause:
    text: str
    score: float
    seen_for: tuple[str, ...]
    seen_against: tuple[str, ...]
    remedy: str
    commands: tuple[str, ...]

    @property
    def confidence(self) -> str:
        return "high" if self.score >= HIGH else "medium" if self.score >= MEDIUM else "low"


@dataclass(frozen=True)
class Match:
    """A signature that holds, with its causes, likeliest first."""

    signature: Signature
    message: str
    line: Line
    ranks: tuple[str, ...]
    layer: str | None
    role: str | None
    """"main", "draft" or None: the log does not say."""
    count: int
    fields: dict[str, str]
    values: dict[str, tuple[str, ...]]
    causes: tuple[RankedCause, ...]
    sighting: Sighting


@dataclass(frozen=True)
class Diagnosis:
    source: str
    lines: int
    size: int
    facts: LogFacts
    launch: LoggedLaunch | None
    matches: tuple[Match, ...]
    """The likeliest root first."""
    first: Line | None
    """The first error, or the first line that a signature explains, whichever stands earlier."""
    unexplained: tuple[Line, ...]
    """Errors that no signature explains, in the log's order."""
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 nothing wrong, 1 a cause was found, 3 an error that nothing explains."""
        if any(match.signature.tier < CONSEQUENCE for match in self.matches):
            return 1
        return 3 if self.unexplained else 0


def judge(seen: Observation, source: str, arch: str | None, notes: Sequence[str]) -> Diagnosis:
    """The diagnosis; `arch` is what the user says of the GPU ("sm_120"), or None."""
    facts = read_facts(seen, arch)
    launch = logged_launch(seen.arguments, source)
    known = facts.lines(launch)
    known += [f"signature {name}" for name in seen.tallies]
    known += ["ready"] if seen.is_ready else []
    known += ["error"] if seen.errors else []
    known += [f"frame {frame.file}" for trace in seen.tracebacks for frame in trace.frames]
    remarks = list(notes)
    matches: list[Match] = []
    for tally in seen.tallies.values():
        kept = _kept(tally, seen, facts, known)
        if kept is not None:
            matches.append(_match(tally, kept, known))
    matches += _conditional(seen, facts, known, matches, remarks)
    present = {match.signature.id for match in matches}
    matches = [one for one in matches if present.isdisjoint(one.signature.yields_to)]
    matches.sort(key=_order)
    explained = {match.sighting.line.number for match in matches}
    unexplained = _unexplained(seen, matches, explained)
    firsts = [match.line for match in matches if match.signature.tier < CONSEQUENCE]
    firsts += [*seen.errors[:1], *unexplained[:1]]
    return Diagnosis(
        source=source,
        lines=seen.lines,
        size=seen.size,
        facts=facts,
        launch=launch,
        matches=tuple(matches),
        first=min(firsts, key=lambda line: line.number) if firsts else None,
        unexplained=tuple(unexplained),
        notes=tuple(remarks),
    )


def _conditional(
    seen: Observation,
    facts: LogFacts,
    known: Sequence[str],
    matches: Sequence[Match],
    remarks: list[str],
) -> list[Match]:
    """What fails on any GPU but SM100 and SM103, in a log that does not say which GPU it is.

    Reported where the log has an error that nothing else explains; else only remarked.
    """
    found: list[Match] = []
    if facts.arch is not None:
        return found
    done = {match.signature.id for match in matches}
    is_explained = any(match.signature.tier < CONSEQUENCE for match in matches)
    for tally in seen.tallies.values():
        signature = tally.signature
        if signature.requires is None or signature.id in done:
            continue
        kept = _kept(tally, seen, facts, known, is_sm12x=True)
        if kept is None:
            continue
        if seen.errors and not is_explained:
            found.append(_match(tally, kept, known))
        remarks.append(
            f"line {kept.line.number}: {signature.title}: right on SM100 and SM103, a "
            "failure on any other GPU; the log does not say which GPU it is, --arch does"
        )
    return found


def _kept(
    tally: Tally,
    seen: Observation,
    facts: LogFacts,
    known: Sequence[str],
    is_sm12x: bool = False,
) -> Sighting | None:
    """The sighting that the signature's conditions hold for, `requires` too unless `is_sm12x`."""
    signature = tally.signature
    if signature.engine != "any" and facts.engine not in (signature.engine, "unknown"):
        return None
    if signature.at_end and not is_last(tally, seen):
        return None
    if signature.excludes is not None and any(map(signature.excludes.search, known)):
        return None
    for sighting in tally.kept:
        lead, window = sighting.lead, sighting.window
        if all(pattern.search(lead) for pattern in signature.near) and not any(
            pattern.search(window) for pattern in signature.absent
        ):
            break
    else:
        return None
    unmet = signature.requires is not None and not any(map(signature.requires.search, known))
    if unmet and not is_sm12x:
        return None
    return sighting


def _match(tally: Tally, sighting: Sighting, known: Sequence[str]) -> Match:
    role = _role(sighting)
    line, trace = sighting.line, sighting.traceback
    if line.rank is None and trace is not None and trace.rank is not None:
        line = replace(line, rank=trace.rank)  # an exception's last line carries no prefix
    text = "\n".join(
        (
            *known,
            *(f"field {name}={value}" for name, value in sighting.fields.items()),
            f"role {role}",
            sighting.window,
            *(
                f"frame {frame.file}:{frame.line} {frame.function} {frame.source or ''}"
                for frame in (trace.frames if trace else ())
            ),
        )
    )
    causes = sorted(
        (_ranked(cause, text) for cause in tally.signature.causes),
        key=lambda cause: -cause.score,
    )
    return Match(
        signature=tally.signature,
        message=_filled(tally.signature.message, sighting.fields),
        line=line,
        ranks=tuple(tally.ranks) or ((line.rank,) if line.rank else ()),
        layer=sighting.fields.get("layer") or sighting.layer,
        role=role,
        count=tally.count,
        fields=sighting.fields,
        values={name: tuple(values) for name, values in tally.values.items()},
        causes=tuple(causes),
        sighting=sighting,
    )


def _ranked(cause: Cause, text: str) -> RankedCause:
    seen_for = tuple(sign.says for sign in cause.confirms if sign.pattern.search(text))
    against = tuple(sign.says for sign in cause.refutes if sign.pattern.search(text))
    score = cause.prior
    for _ in seen_for:
        score += 0.45 * (1 - score)
    for _ in against:
        score *= 0.25
    return RankedCause(cause.text, round(score, 2), seen_for, against, cause.remedy, cause.commands)


def _role(sighting: Sighting) -> str | None:
    layer = sighting.fields.get("layer") or ""
    trace = sighting.traceback
    if layer:
        return "main" if layer.startswith("model.layers") else "draft"
    if trace is not None and trace.is_draft:
        return "draft"
    if trace is not None and any("models/deepseek_v4" in frame.file for frame in trace.frames):
        return "main"
    if sighting.layer:
        return "main" if sighting.layer.startswith("model.layers") else "draft"
    return None


def _filled(message: str, fields: dict[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        return fields.get(found[1], "?")

    return re.sub(r"\{(\w+)\}", value, message)


def _order(match: Match) -> tuple[int, int, int]:
    return (match.signature.tier, _SEVERITIES.index(match.signature.severity), match.line.number)


def _unexplained(seen: Observation, matches: Sequence[Match], explained: set[int]) -> list[Line]:
    """Errors before any explained failure, or long after it, that no signature speaks of; where
    there are none and no cause either, what tells that there was one."""
    failures = [
        match
        for match in matches
        if match.signature.severity is Severity.ERROR and match.signature.tier < CONSEQUENCE
    ]
    shapes = {_DIGITS.sub("0", match.line.text) for match in matches}
    found: list[Line] = []
    for line in seen.errors:
        is_known = line.number in explained or _DIGITS.sub("0", line.text) in shapes
        belongs = any(_belongs(line, match) for match in failures)
        if not is_known and not belongs and line.text.strip():
            found.append(line)
    if not found and all(match.signature.tier >= CONSEQUENCE for match in matches):
        # The server ended over something that the log does not show.
        found += [match.line for match in matches if match.signature.tier == CONSEQUENCE]
    return found


def _belongs(line: Line, match: Match) -> bool:
    """Whether `line` leads to the failure or follows from it."""
    trace = match.sighting.traceback
    first = min(trace.first_line if trace else match.line.number, match.line.number) - 5
    return first <= line.number <= match.line.number + _FOLLOW_ON
