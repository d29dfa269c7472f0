"""A router in front of a pair that points elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit

from dsv4doctor.models import Facts, Finding, Location, Remedy, RouterLaunch, Severity
from dsv4doctor.rules.common import flag
from dsv4doctor.rules.pd_apart import LOOPBACK, host_of
from dsv4doctor.rules.pd_pair import DEFAULT_BOOTSTRAP, PORT, name_of, other_side, pair
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.samples import scene

_SERVICE = "30000"


def check(facts: Facts) -> Iterator[Finding]:
    other = other_side(facts)
    if other is None:
        return
    router = facts.router or other.router
    if router is None:
        raise NotChecked("the router's launch is not given")
    sides = {name_of(side): side for side in (facts, other)}
    if not router.pd:
        yield _finding(
            router,
            "--pd-disaggregation",
            "The router is not told that it is in front of a prefill/decode pair",
            "It sends every request to one server, which can only do half of it.",
        )
    if len(sides) < 2:
        return  # two of one kind, which DSV701 is about
    urls = tuple(url for url, _ in router.prefill)
    for name, known in (("prefill", urls), ("decode", router.decode)):
        if name in sides:
            yield from _side(router, f"--{name}", known, sides[name])
    if "prefill" in sides:
        yield from _bootstrap(router, sides["prefill"])


def _side(router: RouterLaunch, name: str, urls: tuple[str, ...], side: Facts) -> Iterator[Finding]:
    """Whether one of `urls` is that of `side`."""
    port = flag(side, "--port") or _SERVICE
    matching = [url for url in urls if port_of(url) == port]
    if not matching:
        said = ", ".join(urls) or "nothing"
        yield _finding(
            router,
            name,
            f"{name} points at {said}, and the {name_of(side)} server listens on port {port}",
            "The router finds no such server, or sends it requests of the other kind.",
        )
        return
    host = flag(side, "--host") or "127.0.0.1"
    for url in matching:
        inside = host in ("127.0.0.1", "localhost", "::1")
        if inside and host_of(url) not in LOOPBACK:
            yield _finding(
                router,
                name,
                f"{name} points at {url}, and the {name_of(side)} server listens on {host} only",
                "The router's connections are refused.",
            )


def _bootstrap(router: RouterLaunch, prefill: Facts) -> Iterator[Finding]:
    wanted = flag(prefill, PORT) or DEFAULT_BOOTSTRAP
    port = flag(prefill, "--port") or _SERVICE
    for url, said in router.prefill:
        # Without one the decode side takes its own flag's, which DSV701 compares.
        if port_of(url) == port and said not in (None, wanted):
            yield _finding(
                router,
                "bootstrap port",
                f"The router gives {said} for {url}, and the prefill server's bootstrap is on "
                f"{wanted}",
                "The decode side asks at the wrong port for the prefill side's ranks.",
            )


def port_of(url: str) -> str:
    """The port that a URL names, or its scheme's."""
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        return str(parts.port or (443 if parts.scheme == "https" else 80))
    except ValueError:
        return ""


def _finding(router: RouterLaunch, subject: str, what: str, consequence: str) -> Finding:
    return Finding(
        rule=RULE.id,
        severity=Severity.ERROR,
        subject=subject,
        message=f"{what}.",
        consequence=consequence,
        evidence=(f"{router.source}:{router.line}",),
        locations=(Location(router.source, router.line),),
        remedy=Remedy(
            "Write --pd-disaggregation --prefill http://HOST:PORT BOOTSTRAP --decode "
            "http://HOST:PORT with the ports of the two launches."
        ),
    )


RULE = Rule(
    id="DSV703",
    title="A router that points elsewhere",
    severity=Severity.ERROR,
    reads=("launch",),
    check=check,
    about_machine=True,
)

_PREFILL, _DECODE = "http://127.0.0.1:30000", "http://127.0.0.1:30001"


def _routed(**changed: object) -> Facts:
    router = RouterLaunch(
        "router.sh", 3, True, ((_PREFILL, "8998"),), (_DECODE,), (), "127.0.0.1", "8000", "30900"
    )
    return replace(pair(), router=replace(router, **changed))  # type: ignore[arg-type]


EXAMPLES = (
    Example(
        "the wrong way round",
        _routed(prefill=((_DECODE, "8998"),), decode=(_PREFILL,)),
        expect=("--prefill", "--decode"),
    ),
    Example("another decode port", _routed(decode=("http://127.0.0.1:1",)), expect=("--decode",)),
    Example(
        "another bootstrap port",
        _routed(prefill=((_PREFILL, "9000"),)),
        expect=("bootstrap port",),
    ),
    Example("no bootstrap port", _routed(prefill=((_PREFILL, None),))),
    Example("no pair", _routed(pd=False), expect=("--pd-disaggregation",)),
    Example(
        "a server that listens inside only",
        _routed(decode=("http://10.0.0.2:30001",)),
        expect=("--decode",),
    ),
    Example("right", _routed()),
    Example("one server", scene()),
)
