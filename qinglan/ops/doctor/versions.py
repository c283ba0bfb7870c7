"""Python and packages, by what is installed; none of them is imported."""

import platform
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import qinglan
from qinglan.config import FlowName, Profile
from qinglan.ops.checks import Check
from qinglan.ops.preflight import ENGINE_FLOWS

LOCK = Path(qinglan.__file__).parents[1] / "requirements.lock"
"""The versions that the tests ran with; an installed wheel has no such file."""
_SHOWN = 5
_HINT = "run `make setup`, or install Qinglan anew in this environment"


def installed(name: str) -> Version | None:
    try:
        return Version(version(name))
    except PackageNotFoundError:
        return None


def check_python() -> Check:
    wanted, found = metadata("qinglan")["Requires-Python"], platform.python_version()
    if SpecifierSet(wanted).contains(found, prereleases=True):
        return Check("python", found)
    return Check("python", found, f"python: this is {found}, Qinglan needs {wanted}; make the environment with another")


def check_packages(profile: Profile, flow: FlowName) -> Check:
    """What Qinglan needs here, with what it was tested with beside it."""
    trainer = profile.trainer
    extra = "trainer" if flow in ENGINE_FLOWS and not (trainer.python or trainer.ray_dashboard_url) else ""
    known = [Requirement(text) for text in requires("qinglan") or ()]
    needed = [each for each in known if each.marker is None or each.marker.evaluate({"extra": extra})]
    detail, wrong = f"qinglan {installed('qinglan')}, {len(needed)} packages that it needs", []
    for each in needed:
        found = installed(each.name)
        if found is None:
            wrong.append(f"{each.name} is missing")
        elif not each.specifier.contains(found, prereleases=True):
            wrong.append(f"{each.name} is {found}, needed is {each.specifier}")
    if wrong:
        return Check("packages", detail, f"packages: {_some(wrong)}; {_HINT}")
    if not LOCK.is_file():
        return Check("packages", f"{detail}; tested versions are not known, as requirements.lock is only in a checkout")
    lines = (line.partition("==") for line in LOCK.read_text(encoding="utf-8").splitlines() if "==" in line)
    tested = {canonicalize_name(name): found.strip() for name, _, found in lines}
    others = [
        f"{each.name} {found} (tested with {tested[name]})"
        for each in needed
        if (name := canonicalize_name(each.name)) in tested
        and (found := installed(each.name))
        and found.public != tested[name]
    ]
    return Check("packages", detail, note=f"{_some(others)}; {_HINT} to have those of the lock" if others else None)


def _some(texts: list[str]) -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more
