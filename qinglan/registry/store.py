"""The registry itself, over MLflow's model registry; changes one at a time, by a file lock in the
state folder.

A change writes its aliases in an order that leaves a champion wherever a kill hits; the next change
completes it.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock
from sqlalchemy.exc import SQLAlchemyError

from qinglan.config import Profile
from qinglan.errors import ArtifactError, ConfigError, first_line
from qinglan.evaluation.models import Decision
from qinglan.registry.versions import (
    ADVICE,
    ALIASES,
    FILES,
    Alias,
    Candidate,
    Released,
    decision_tags,
    log_files,
    restore,
    tags_of,
)
from qinglan.runs.artifacts import sha256_of, write_json
from qinglan.runs.run import Run

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

_LOG = logging.getLogger(__name__)
RIVAL_FILE = "champion.json"
"""In a run's directory."""


@dataclass(eq=False)
class Registry:
    uri: str
    name: str
    state: Path
    max_artifact_mb: float = 200

    def register(self, candidate: Candidate) -> Released:
        """Keep a model with all that it was made of; the version that is there where nothing is
        new."""
        # Files first, then the version: what is in the registry is complete.
        with (
            self.asking() as client
        ):  # hashing and copying may take minutes, for which no rollback should wait
            known = self._of_identity(candidate.identity)
            weights = (
                known.weights if known else log_files(client, candidate, self.max_artifact_mb * 1e6)
            )
        with self._change() as client:
            if known := self._of_identity(candidate.identity):
                return self._redecide(known, candidate.decision)
            root = client.get_run(candidate.mlflow_run_id).info.artifact_uri
            about = f"Models of recipe {candidate.recipe} for tenant {candidate.tenant}."
            with self.asking("RESOURCE_ALREADY_EXISTS"):
                client.create_registered_model(self.name, description=about)
            tags, about = tags_of(candidate, weights), candidate.description[:5000]
            run_id = candidate.mlflow_run_id
            made = client.create_model_version(
                self.name, f"{root}/{FILES}", run_id, tags=tags, description=about
            )
            registered = self._released(made, {})
            write_json(self._digest_file(registered), registered.sha256)
            return registered

    def versions(self) -> list[Released]:
        with self.asking() as client:
            aliases = self.aliases()
            found = all_pages(
                lambda token: client.search_model_versions(f"name='{self.name}'", page_token=token)
            )
        mine = [self._released(version, aliases) for version in found if "identity" in version.tags]
        return sorted(mine, key=lambda version: int(version.version), reverse=True)

    def _of_identity(self, identity: str) -> Released | None:
        return next((version for version in self.versions() if version.identity == identity), None)

    def version(self, version: str) -> Released:
        """Raises `ConfigError` where there is none of that number."""
        found: ModelVersion | None = None
        with self.asking("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE") as client:
            found = client.get_model_version(self.name, version)
        if found is None or "identity" not in found.tags:
            known = ", ".join(each.version for each in self.versions()[:5]) or "none"
            raise ConfigError(
                f"release `{version}` of {self.name}: there is no such version; newest: {known}"
            )
        return self._released(found, self.aliases())

    def aliases(self) -> dict[Alias, str]:
        """Alias to version: the cheapest thing to poll."""
        named: Mapping[str, str] = {}
        with self.asking("RESOURCE_DOES_NOT_EXIST") as client:
            # Only here does MLflow's database store return them; a search leaves them out.
            named = client.get_registered_model(self.name).aliases
        return {alias: str(named[alias]) for alias in ALIASES if alias in named}

    def released(self, alias: Alias) -> Released | None:
        version = self.aliases().get(alias)
        return self.version(version) if version else None

    def named(self, name: str) -> Released:
        """By its number or an alias; raises `ConfigError` where there is none."""
        alias = next((each for each in ALIASES if each == name), None)
        if alias is None:
            return self.version(name)
        if found := self.released(alias):
            return found
        raise ConfigError(f"{self.name}: no version is its {name}; see `qinglan release list`")

    def promote(self, version: str, *, force_reason: str = "") -> Released:
        """Make it the champion, that the previous one; `ConfigError` where the gate said no and
        nothing forces it."""
        with self._change() as client:
            wanted, aliases = self._releasable(version, force_reason), self.aliases()
            old, forced = aliases.get("champion", ""), ""
            if force_reason:
                self._set_tags(version, forced=force_reason)
                forced = f", although the gate said {wanted.verdict}: {force_reason}"
            if old != version:
                self._note(wanted, f"promoted{f', replaces version {old}' if old else ''}{forced}")
                self._replace(wanted, old)
            if aliases.get("challenger") == version:
                client.delete_registered_model_alias(self.name, "challenger")
            return self.version(version)

    def assign_alias(
        self, version: str, role: Literal["champion", "challenger", "none"], instead_of: str | None
    ) -> Released:
        """Give a passed version its alias, once, unless another model than `instead_of` is champion
        by now."""
        with self._change():
            wanted, champion = self.version(version), self.aliases().get("champion")
            if wanted.alias_is_decided or wanted.verdict != "promote":
                return wanted
            why = ""
            if role != "none" and champion != version and (twin := self._same_weights(wanted)):
                why, role = (
                    f"{twin}; `qinglan release promote {version}` serves it all the same",
                    "none",
                )
            elif role != "none" and champion not in (None, instead_of, version):
                why = f"version {champion} became the champion meanwhile; evaluate again"
            elif role == "challenger" and self.aliases().get("challenger") not in (None, version):
                why = f"another canary is running; `qinglan canary start {version}` takes its place"
            if why:
                self._note(wanted, f"stays without an alias: {why}")
            elif role == "champion":
                self.promote(version)
            elif role == "challenger" and champion != version:
                self.challenge(version)
            if role == "none" or not why:  # else another evaluation may give it one
                self._set_tags(version, settled=role)
            return self.version(version)

    def redecide(self, version: str, decision: Decision) -> Released:
        """Keep a person's decision; raises `ConfigError` where another person has decided
        meanwhile."""
        with self._change():
            found = self.version(version)
            if found.verdict != "undecided":
                raise ConfigError(
                    f"release {version} of {self.name}: is decided by now: {found.sentence}"
                )
            return self._redecide(found, decision)

    def challenge(self, version: str, *, force_reason: str = "") -> Released:
        """Make it the challenger, for a canary; raises what `promote` does, and `ConfigError` for
        the champion."""
        with self._change() as client:
            wanted = self._releasable(version, force_reason)
            if "champion" in wanted.aliases:
                raise ConfigError(
                    f"release {version} of {self.name}: is the champion, so it can't challenge it"
                )
            if "challenger" not in wanted.aliases:
                self.withdraw_challenger(f"version {version} took its place")
                forced = (
                    f", although the gate said {wanted.verdict}: {force_reason}"
                    if force_reason
                    else ""
                )
                self._note(wanted, f"became the challenger{forced}")
                if force_reason:
                    self._set_tags(version, forced=force_reason)
                self._drop_tags(version, "withdrawn")
                client.set_registered_model_alias(self.name, "challenger", version)
            return self.version(version)

    def withdraw_challenger(self, reason: str, version: str | None = None) -> Released | None:
        """End a canary, only this version's if one is given; the version that lost its alias, if
        there was one."""
        with self._change() as client:
            named = self.aliases().get("challenger")
            if named is None or version not in (None, named):
                return None
            self._note(self.version(named), f"withdrawn: {reason}")
            self._set_tags(named, withdrawn=reason)
            client.delete_registered_model_alias(self.name, "challenger")
            return self.version(named)

    def roll_back(self, reason: str) -> Released:
        """Champion and previous change places; the new champion.

        What was rolled back comes back by `promote` only: a second rollback does not undo the
        first.
        """
        with self._change() as client:
            repaired, aliases = self._repair(), self.aliases()
            bad, good = aliases.get("champion"), aliases.get("previous")
            if bad is None or good is None:
                raise ConfigError(
                    f"{self.name}: has no previous champion to return to; see `qinglan release list`"
                )
            back, champion = self.version(good), self.version(bad)
            if back.rolled_back_to == bad:
                if repaired:
                    return champion  # this very rollback was interrupted before
                when, hint = (
                    back.rolled_back_at,
                    f"`qinglan release promote {good}` returns to it all the same",
                )
                raise ConfigError(
                    f"{self.name}: version {good} was itself rolled back to {bad}, at {when}; {hint}"
                )
            self._require_weights(back)
            self._note(champion, f"rolled back to version {good}: {reason}")
            self._set_tags(bad, rolled_back=reason, rolled_back_to=good, rolled_back_at=_second())
            self._note(back, f"champion again, after version {bad}: {reason}")
            client.set_registered_model_alias(self.name, "champion", good)
            client.set_registered_model_alias(self.name, "previous", bad)
            return self.version(good)

    def folder(self, released: Released, say: Callable[[str], object] = _LOG.warning) -> Path:
        """The merged weights, their digest checked; restored from MLflow where they are missing or
        changed.

        Raises `ArtifactError` where they can't be had, or where MLflow's digest is not the one that
        this site recorded.
        """
        self._check_digest(released, say)
        kept = self.state / "models" / self.name / released.version
        for folder in (released.folder, kept):
            if folder.is_dir() and sha256_of(folder) == released.sha256:
                return folder
        if released.weights != "mlflow":
            state = f"{released.folder} {'was changed' if released.folder.is_dir() else 'is gone'}"
            why = "its weights are larger than release.max_artifact_mb, so MLflow has none"
            where = f"release {released.version} of {self.name}"
            raise ArtifactError(f"{where}: {state}, and {why}; put that folder back, {ADVICE}")
        kept.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(kept.parent / ".lock"):  # another process may have restored them meanwhile
            if not kept.is_dir() or sha256_of(kept) != released.sha256:
                with self.asking() as client:
                    restore(client, released, kept)
            return kept

    def _digest_file(self, released: Released) -> Path:
        return self.state / "registry" / self.name / f"{released.version}.json"

    def _check_digest(self, released: Released, say: Callable[[str], object]) -> None:
        """Weights and digest could be exchanged together by whoever can write to MLflow."""
        file, where = self._digest_file(released), f"release {released.version} of {self.name}"
        if not file.exists():
            write_json(file, released.sha256)
            say(
                f"{where}: this site had no record of its weights' digest, and keeps MLflow's in {file} from now on"
            )
        elif json.loads(file.read_text(encoding="utf-8")) != released.sha256:
            problem = f"the digest that MLflow has of its weights is not the one in {file}"
            hint = f"find out who changed it, and remove that file if it was meant, {ADVICE}"
            raise ArtifactError(f"{where}: {problem}; {hint}")

    def read_champion(self) -> Released | None:
        """The champion, with weights that can be loaded; large ones are not hashed."""
        champion = None if is_missing_database(self.uri) else self.released("champion")
        if champion and (champion.weights == "mlflow" or not champion.folder.is_dir()):
            self.folder(champion)
        return champion

    def _redecide(self, released: Released, decision: Decision) -> Released:
        if (released.verdict, released.sentence) == (decision.verdict, decision.sentence):
            return released
        self._note(released, f"decided anew: {decision.sentence}")
        if (
            released.alias_is_decided
            and released.verdict == "promote"
            and decision.verdict != "promote"
        ):
            return self.version(released.version)  # only users and canaries change its alias
        self._set_tags(released.version, **decision_tags(decision))
        return self.version(released.version)

    def _same_weights(self, wanted: Released) -> str:
        twins = [
            each
            for each in self.versions()
            if each.sha256 == wanted.sha256 and each.version != wanted.version
        ]
        for each in sorted(twins, key=lambda each: "champion" not in each.aliases):
            if "champion" in each.aliases:
                return f"version {each.version}, the champion, has the same weights"
            if each.rolled_back_to or each.withdrawn:
                how = "rolled back" if each.rolled_back_to else "withdrawn"
                return f"version {each.version} has the same weights and was {how}"
        return ""

    def _replace(self, new: Released, old: str) -> None:
        """Champion ← new, previous ← old: `previous` first, so that there always is a champion."""
        self._set_tags(new.version, replaced=old)
        self._drop_tags(new.version, "rolled_back", "rolled_back_to", "rolled_back_at", "withdrawn")
        if old:
            before = self.version(old)
            if not before.promoted_at:  # its own promotion was killed just before it could say so
                self._set_tags(old, promoted_at=_second())
            # The same weights under a later decision: a rollback is to return to others.
            if before.sha256 != new.sha256:
                self._client.set_registered_model_alias(self.name, "previous", old)
        self._client.set_registered_model_alias(self.name, "champion", new.version)
        self._set_tags(new.version, promoted_at=_second())  # once it is true

    def _repair(self) -> bool:
        """Complete what a killed process left half done; was there anything?"""
        aliases = self.aliases()
        champion = aliases.get("champion", "")
        doubled = [
            alias
            for alias in ("challenger", "previous")
            if champion and aliases.get(alias) == champion
        ]
        for alias in doubled:
            if before := self._before(champion) if alias == "previous" else "":
                self._client.set_registered_model_alias(self.name, alias, before)
            else:
                self._client.delete_registered_model_alias(self.name, alias)
        return bool(doubled)

    def _before(self, champion: str) -> str:
        """What a rollback to it, or else its promotion, replaced."""
        versions = self.versions()
        if rolled_back := [version for version in versions if version.rolled_back_to == champion]:
            return max(rolled_back, key=lambda version: version.rolled_back_at).version
        return next(version.replaced for version in versions if version.version == champion)

    def _releasable(self, version: str, force_reason: str) -> Released:
        self._repair()
        wanted = self.version(version)
        if wanted.verdict != "promote" and not force_reason:
            said = f"the gate said {wanted.verdict} ({wanted.sentence})"
            hint = "--force with a --reason releases it all the same"
            raise ConfigError(f"release {version} of {self.name}: {said}; {hint}")
        self._require_weights(wanted)
        return wanted

    def _require_weights(self, released: Released) -> None:
        """A quick check, as a rollback must not wait for the digest of 60 GB."""
        if released.weights != "mlflow" and not released.folder.is_dir():
            self.folder(released)

    def _released(self, found: "ModelVersion", aliases: Mapping[Alias, str]) -> Released:
        version = str(found.version)
        created = datetime.fromtimestamp(found.creation_timestamp / 1000, UTC)
        released = Released.of_tags(self.name, version, created, found.tags)
        mine = tuple(alias for alias in ALIASES if aliases.get(alias) == version)
        return released.model_copy(update={"aliases": mine})

    def _set_tags(self, version: str, **tags: str) -> None:
        for key, value in tags.items():
            self._client.set_model_version_tag(self.name, version, key, value)

    def _drop_tags(self, version: str, *names: str) -> None:
        present = self._client.get_model_version(self.name, version).tags
        for name in names:
            if name in present:
                self._client.delete_model_version_tag(self.name, version, name)

    def _note(self, released: Released, line: str) -> None:
        line = " ".join(line.split())
        if released.history and released.history[-1].partition(" ")[2] == line:
            return  # an interrupted attempt has said so
        self._set_tags(
            released.version, history="\n".join((*released.history, f"{_second()} {line}"))
        )

    @cached_property
    def _lock(self) -> FileLock:
        folder = self.state / "registry"
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / f"{self.name}.lock")

    @contextmanager
    def _change(self) -> Iterator["MlflowClient"]:
        with self._lock, self.asking() as client:
            yield client

    @contextmanager
    def asking(self, *ignored_codes: str) -> Iterator["MlflowClient"]:
        """MLflow's client; its errors become `ConfigError`, except those of these codes."""
        from mlflow.exceptions import MlflowException

        try:
            yield self._client
        except (MlflowException, SQLAlchemyError) as error:
            if getattr(error, "error_code", None) not in ignored_codes:
                raise ConfigError(
                    f"tracking.uri: MLflow at {self.uri}: {first_line(error)}"
                ) from error

    @cached_property
    def _client(self) -> "MlflowClient":
        from qinglan.runs.tracking import open_client  # imports MLflow, which takes seconds

        return open_client(self.uri)


def _second() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def is_missing_database(uri: str) -> bool:
    """MLflow would make a database that is not there."""
    path = uri.removeprefix("sqlite:///")
    return path != uri and not Path(path).is_file()


def all_pages(search: Callable[[str | None], Any]) -> list[Any]:
    """What MLflow finds; `search` takes the token of the next page."""
    page = search(None)
    found = list(page)
    while page.token:
        page = search(page.token)
        found += page
    return found


def registry_of(profile: Profile, name: str = "") -> Registry:
    """Of the profile's own model, or of the one with that name."""
    state, most_mb = profile.paths.state.resolve(), profile.release.max_artifact_mb
    return Registry(profile.tracking_uri, name or profile.model_name, state, most_mb)


def rival_of(run: Run) -> Released | None:
    """The champion that a run's model is to beat: the one there was when the run first asked; None
    before the first.

    A run that goes on after it has promoted its own model does not compare that with itself.
    """
    registry, path = registry_of(run.profile), run.directory / RIVAL_FILE
    pinned: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if pinned.get("name") == registry.name:
        champion = registry.version(pinned["version"]) if pinned["version"] else None
        if champion is None or champion.sha256 == pinned["sha256"]:
            return champion
    champion = registry.released("champion")
    version, sha256 = (champion.version, champion.sha256) if champion else ("", "")
    write_json(path, {"name": registry.name, "version": version, "sha256": sha256})
    return champion


def champion_of(run: Run) -> Released | None:
    """`rival_of` with its weights where they can be loaded."""
    champion = rival_of(run)
    return champion and champion.model_copy(
        update={"folder": registry_of(run.profile).folder(champion)}
    )
