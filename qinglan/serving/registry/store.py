"""The registry itself, over MLflow's model registry: a database or a server.

One change at a time: a file lock in the site's state folder. A change writes several aliases, one after the other, in
an order that leaves a champion that can serve wherever a kill hits; the next change completes what is half done.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from filelock import FileLock

from qinglan.config import Profile
from qinglan.errors import ArtifactError, ConfigError, first_line
from qinglan.evaluation.models import Decision
from qinglan.runs.artifacts import sha256_of, write_json
from qinglan.runs.run import Run
from qinglan.serving.registry.versions import ALIASES, Alias, Candidate, Released, decision_tags, tags_of
from qinglan.serving.registry.weights import ADVICE, ROOT, log_files, restore

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

RIVAL_FILE = "champion.json"
"""In a run's directory."""


class Registry:
    def __init__(self, tracking_uri: str, name: str, state: Path, max_artifact_mb: float = 200) -> None:
        self.name, self._uri, self._state, self._max_bytes = name, tracking_uri, state, max_artifact_mb * 1e6

    def register(self, candidate: Candidate) -> Released:
        """Keep a model with all that it was made of; the version that is there where nothing is new."""
        # Files first, then the version: what is in the registry is complete.
        with self._reading() as client:  # hashing and copying may take minutes, for which no rollback should wait
            known = self._known(client, candidate)
            weights = known.weights if known else log_files(client, candidate, self._max_bytes)
        with self._change() as client:
            if known := self._known(client, candidate):
                return self._redecide(client, known, candidate.decision)
            root = client.get_run(candidate.mlflow_run_id).info.artifact_uri
            about = f"Models of recipe {candidate.recipe} for tenant {candidate.tenant}."
            with _ignoring("RESOURCE_ALREADY_EXISTS"):
                client.create_registered_model(self.name, description=about)
            made = client.create_model_version(
                self.name,
                f"{root}/{ROOT}",
                run_id=candidate.mlflow_run_id,
                tags=tags_of(candidate, weights),
                description=candidate.description[:5000],
            )
            return self._released(made, {})

    def versions(self) -> list[Released]:
        """The newest first."""
        with self._reading() as client:
            return self._versions(client)

    def version(self, version: str) -> Released:
        """Raises `ConfigError` where there is none of that number."""
        with self._reading() as client:
            return self._version(client, version)

    def aliases(self) -> dict[Alias, str]:
        """Alias to version: the cheapest thing to poll."""
        with self._reading() as client:
            return self._aliases(client)

    def released(self, alias: Alias) -> Released | None:
        with self._reading() as client:
            version = self._aliases(client).get(alias)
            return self._version(client, version) if version else None

    def promote(self, version: str, *, force_reason: str = "") -> Released:
        """Make it the champion; the champion becomes the previous one.

        Raises:
            ConfigError: no such version, or the gate did not pass it and `force_reason` is empty.
            ArtifactError: its weights can't be found.
        """
        with self._change() as client:
            wanted, aliases = self._releasable(client, version, force_reason), self._aliases(client)
            old = aliases.get("champion", "")
            forced = f", although the gate said {wanted.verdict}: {force_reason}" if force_reason else ""
            if force_reason:
                client.set_model_version_tag(self.name, version, "forced", force_reason)
            if old != version:
                self._note(client, wanted, f"promoted{f', replaces version {old}' if old else ''}{forced}")
                self._replace(client, wanted, old)
            if aliases.get("challenger") == version:
                client.delete_registered_model_alias(self.name, "challenger")
            return self._version(client, version)

    def settle(self, version: str, role: Literal["champion", "challenger", "none"], instead_of: str | None) -> Released:
        """Give a version that passed its place, once: what a user or a canary did with it since then stays.

        Unless there is another champion by now than the one that the gate compared it with, `instead_of`.
        """
        with self._change() as client:
            wanted, champion = self._version(client, version), self._aliases(client).get("champion")
            if wanted.placed or wanted.verdict != "promote":
                return wanted
            twin = "" if role == "none" or champion == version else self._same_weights(client, wanted)
            if twin:
                line = f"stays without an alias: {twin}; `qinglan release promote {version}` serves it all the same"
                self._note(client, wanted, line)
                role = "none"
            elif role != "none" and champion not in (None, instead_of, version):
                line = f"stays without an alias: version {champion} became the champion meanwhile; evaluate again"
                self._note(client, wanted, line)
                return self._version(client, version)
            if role == "champion":
                self.promote(version)
            elif role == "challenger" and champion != version:
                self.challenge(version)
            self._set_tags(client, version, {"settled": role})
            return self._version(client, version)

    def redecide(self, version: str, decision: Decision) -> Released:
        """Keep a person's decision; raises `ConfigError` where another person has decided meanwhile."""
        with self._change() as client:
            found = self._version(client, version)
            if found.verdict != "undecided":
                raise ConfigError(f"release {version} of {self.name}: is decided by now: {found.sentence}")
            return self._redecide(client, found, decision)

    def challenge(self, version: str, *, force_reason: str = "") -> Released:
        """Make it the challenger, for a canary; raises what `promote` does, and `ConfigError` for the champion."""
        with self._change() as client:
            wanted = self._releasable(client, version, force_reason)
            if "champion" in wanted.aliases:
                raise ConfigError(f"release {version} of {self.name}: is the champion, so it can't challenge it")
            if "challenger" not in wanted.aliases:
                self._note(client, wanted, "became the challenger")
                self._drop_tags(client, version, ["withdrawn"])
                client.set_registered_model_alias(self.name, "challenger", version)
            return self._version(client, version)

    def withdraw_challenger(self, reason: str, version: str | None = None) -> Released | None:
        """End a canary, only this version's if one is given; the version that lost its alias, if there was one."""
        with self._change() as client:
            named = self._aliases(client).get("challenger")
            if named is None or version not in (None, named):
                return None
            challenger = self._version(client, named)
            self._note(client, challenger, f"withdrawn: {reason}")
            client.set_model_version_tag(self.name, named, "withdrawn", reason)
            client.delete_registered_model_alias(self.name, "challenger")
            return self._version(client, named)

    def roll_back(self, reason: str) -> Released:
        """Champion and previous change places; the new champion.

        What was rolled back comes back by `promote` only: a second rollback does not undo the first.

        Raises:
            ConfigError: there is nothing to return to.
            ArtifactError: its weights can't be found.
        """
        with self._change() as client:
            repaired = self._repair(client)
            aliases = self._aliases(client)
            bad, good = (aliases.get(alias) for alias in ("champion", "previous"))
            if bad is None or good is None:
                raise ConfigError(f"{self.name}: has no previous champion to return to; see `qinglan release list`")
            back, champion = self._version(client, good), self._version(client, bad)
            if back.rolled_back_to == bad:
                if repaired:
                    return champion  # this very rollback was interrupted before
                raise ConfigError(
                    f"{self.name}: version {good} was itself rolled back to {bad}, at {back.rolled_back_at}; "
                    f"`qinglan release promote {good}` returns to it all the same"
                )
            self._require_weights(back)
            self._note(client, champion, f"rolled back to version {good}: {reason}")
            self._set_tags(client, bad, {"rolled_back": reason, "rolled_back_to": good, "rolled_back_at": _second()})
            self._note(client, back, f"champion again, after version {bad}: {reason}")
            client.set_registered_model_alias(self.name, "champion", good)
            client.set_registered_model_alias(self.name, "previous", bad)
            return self._version(client, good)

    def folder(self, released: Released) -> Path:
        """The merged weights, their digest checked; restored from MLflow where they are missing or changed.

        Raises `ArtifactError` where they can't be found.
        """
        kept = self._state / "models" / self.name / released.version
        for folder in (released.folder, kept):
            if folder.is_dir() and sha256_of(folder) == released.sha256:
                return folder
        if released.weights != "mlflow":
            state = "was changed" if released.folder.is_dir() else "is gone"
            raise ArtifactError(
                f"release {released.version} of {self.name}: {released.folder} {state}, and its weights are larger "
                f"than release.max_artifact_mb, so MLflow has none; put that folder back, {ADVICE}"
            )
        kept.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(kept.parent / ".lock"):  # another process may have restored them meanwhile
            if not kept.is_dir() or sha256_of(kept) != released.sha256:
                with self._reading() as client:
                    restore(client, released, kept)
            return kept

    def read_champion(self) -> Released | None:
        """The champion, with weights that can be loaded; large ones are not hashed. Raises what `folder` does."""
        champion = self.released("champion")
        if champion and (champion.weights == "mlflow" or not champion.folder.is_dir()):
            self.folder(champion)
        return champion

    def _redecide(self, client: "MlflowClient", released: Released, decision: Decision) -> Released:
        if (released.verdict, released.sentence) == (decision.verdict, decision.sentence):
            return released
        self._note(client, released, f"decided anew: {decision.sentence}")
        if released.placed and released.verdict == "promote" and decision.verdict != "promote":
            return self._version(client, released.version)  # it has its place, which only users and canaries change
        self._set_tags(client, released.version, decision_tags(decision))
        return self._version(client, released.version)

    def _known(self, client: "MlflowClient", candidate: Candidate) -> Released | None:
        return next((v for v in self._versions(client) if v.identity == candidate.identity), None)

    def _same_weights(self, client: "MlflowClient", wanted: Released) -> str:
        """Why another evaluation of weights that are known gives them no place; empty if it does."""
        versions = self._versions(client)
        twins = [each for each in versions if each.sha256 == wanted.sha256 and each.version != wanted.version]
        if found := next((each for each in twins if "champion" in each.aliases), None):
            return f"version {found.version}, the champion, has the same weights"
        for each in twins:
            if each.rolled_back_to or each.withdrawn:
                how = "rolled back" if each.rolled_back_to else "withdrawn"
                return f"version {each.version} has the same weights and was {how}"
        return ""

    def _replace(self, client: "MlflowClient", new: Released, old: str) -> None:
        """Champion ← new, previous ← old: `previous` first, so that there always is a champion."""
        self._set_tags(client, new.version, {"replaced": old})
        self._drop_tags(client, new.version, ["rolled_back", "rolled_back_to", "rolled_back_at", "withdrawn"])
        if old:
            before = self._version(client, old)
            if not before.promoted_at:  # its own promotion was killed just before it could say so
                self._set_tags(client, old, {"promoted_at": _second()})
            # The same weights under a later decision: a rollback is to return to others.
            if before.sha256 != new.sha256:
                client.set_registered_model_alias(self.name, "previous", old)
        client.set_registered_model_alias(self.name, "champion", new.version)
        self._set_tags(client, new.version, {"promoted_at": _second()})  # once it is true

    def _repair(self, client: "MlflowClient") -> bool:
        """Complete what a killed process left half done; was there anything?"""
        aliases = self._aliases(client)
        champion = aliases.get("champion")
        if champion is None or champion not in (aliases.get("previous"), aliases.get("challenger")):
            return False
        if aliases.get("challenger") == champion:
            client.delete_registered_model_alias(self.name, "challenger")
        if aliases.get("previous") == champion:
            versions = self._versions(client)
            rolled_back = [version for version in versions if version.rolled_back_to == champion]
            if rolled_back:
                before = max(rolled_back, key=lambda version: version.rolled_back_at).version
            else:
                before = next(version.replaced for version in versions if version.version == champion)
            if before:
                client.set_registered_model_alias(self.name, "previous", before)
            else:
                client.delete_registered_model_alias(self.name, "previous")
        return True

    def _releasable(self, client: "MlflowClient", version: str, force_reason: str) -> Released:
        self._repair(client)
        wanted = self._version(client, version)
        if wanted.verdict != "promote" and not force_reason:
            raise ConfigError(
                f"release {version} of {self.name}: the gate said {wanted.verdict} ({wanted.sentence}); "
                "--force with a --reason releases it all the same"
            )
        self._require_weights(wanted)
        return wanted

    def _require_weights(self, wanted: Released) -> None:
        # A quick check: a rollback must not wait for the digest of 60 GB.
        if wanted.weights != "mlflow" and not wanted.folder.is_dir():
            self.folder(wanted)

    def _versions(self, client: "MlflowClient") -> list[Released]:
        aliases = self._aliases(client)
        found: list[ModelVersion] = []
        token: str | None = None
        while token is None or token:
            page = client.search_model_versions(f"name='{self.name}'", page_token=token or None)
            found += page
            token = page.token or ""
        mine = [self._released(version, aliases) for version in found if "identity" in version.tags]
        return sorted(mine, key=lambda version: int(version.version), reverse=True)

    def _version(self, client: "MlflowClient", version: str) -> Released:
        found = None
        with _ignoring("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            found = client.get_model_version(self.name, version)
        if found is None or "identity" not in found.tags:
            known = ", ".join(each.version for each in self._versions(client)[:5]) or "none"
            raise ConfigError(f"release `{version}` of {self.name}: there is no such version; newest: {known}")
        return self._released(found, self._aliases(client))

    def _released(self, found: "ModelVersion", aliases: Mapping[Alias, str]) -> Released:
        version = str(found.version)
        created = datetime.fromtimestamp(found.creation_timestamp / 1000, UTC)
        released = Released.of_tags(self.name, version, created, found.tags)
        mine = tuple(alias for alias in ALIASES if aliases.get(alias) == version)
        return released.model_copy(update={"aliases": mine})

    def _aliases(self, client: "MlflowClient") -> dict[Alias, str]:
        named: Mapping[str, str] = {}
        with _ignoring("RESOURCE_DOES_NOT_EXIST"):
            # Only here does MLflow's database store return them; a search leaves them out.
            named = client.get_registered_model(self.name).aliases
        return {alias: str(named[alias]) for alias in ALIASES if alias in named}

    def _set_tags(self, client: "MlflowClient", version: str, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            client.set_model_version_tag(self.name, version, key, value)

    def _drop_tags(self, client: "MlflowClient", version: str, names: Sequence[str]) -> None:
        present = client.get_model_version(self.name, version).tags
        for name in names:
            if name in present:
                client.delete_model_version_tag(self.name, version, name)

    def _note(self, client: "MlflowClient", released: Released, line: str) -> None:
        line = " ".join(line.split())
        if released.history and released.history[-1].partition(" ")[2] == line:
            return  # an interrupted attempt has said so
        lines = (*released.history, f"{_second()} {line}")
        client.set_model_version_tag(self.name, released.version, "history", "\n".join(lines))

    @cached_property
    def _lock(self) -> FileLock:
        folder = self._state / "registry"
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / f"{self.name}.lock")

    @contextmanager
    def _change(self) -> Iterator["MlflowClient"]:
        with self._lock, self._reading() as client:
            yield client

    @contextmanager
    def _reading(self) -> Iterator["MlflowClient"]:
        from mlflow.exceptions import MlflowException

        try:
            yield self._client
        except MlflowException as error:
            raise ConfigError(f"MLflow's registry at {self._uri}: {first_line(error)}; see tracking.uri") from error

    @cached_property
    def _client(self) -> "MlflowClient":
        from qinglan.runs.tracking import open_client  # imports MLflow, which takes seconds

        return open_client(self._uri)


@contextmanager
def _ignoring(*error_codes: str) -> Iterator[None]:
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code not in error_codes:
            raise


def _second() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def registry_of(profile: Profile) -> Registry:
    return Registry(
        profile.tracking_uri, profile.model_name, profile.paths.state.resolve(), profile.release.max_artifact_mb
    )


def rival_of(run: Run) -> Released | None:
    """The champion that a run's model is to beat: the one there was when the run first asked; None before the first.

    A run that goes on after it has promoted its own model does not compare that with itself.
    """
    registry, path = registry_of(run.profile), run.directory / RIVAL_FILE
    try:
        pinned: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        pinned = {}
    if pinned.get("name") == registry.name:
        champion = registry.version(pinned["version"]) if pinned["version"] else None
        if champion is None or champion.sha256 == pinned["sha256"]:
            return champion
    champion = registry.released("champion")
    version, sha256 = (champion.version, champion.sha256) if champion else ("", "")
    write_json(path, {"name": registry.name, "version": version, "sha256": sha256})
    return champion


def champion_of(run: Run) -> Released | None:
    """`rival_of` with its weights; raises what `Registry.folder` does."""
    champion = rival_of(run)
    return champion and champion.model_copy(update={"folder": registry_of(run.profile).folder(champion)})
