"""The registry of released models, over MLflow's model registry.

Changes are made one at a time, by a file lock in the state folder. A change writes its aliases in
an order that leaves a champion wherever a kill hits; the next change completes it.
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
    Weights,
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
"""File in a run's directory that names the champion there was when the run first asked."""
_MOST_DESCRIPTION_CHARS = 5000


@dataclass(eq=False)
class Registry:
    """The versions of one registered model."""

    uri: str
    name: str
    state: Path
    max_artifact_mb: float = 200

    def register(self, candidate: Candidate) -> Released:
        """Keep a model with all that it was made of.

        Where the registry has this model with the same evaluation and rules, that version is
        returned, with the candidate's decision.
        """
        # The files come first, so that whatever is in the registry is complete. They are logged
        # without the lock: hashing and copying may take minutes, for which no rollback should wait.
        with self.asking() as client:
            registered = self._of_identity(candidate.identity)
            if registered:
                weights = registered.weights
            else:
                weights = log_files(client, candidate, self.max_artifact_mb * 1e6)
        with self._change() as client:
            registered = self._of_identity(candidate.identity)
            if registered:
                return self._redecide(registered, candidate.decision)
            return self._create_version(client, candidate, weights)

    def _create_version(
        self, client: "MlflowClient", candidate: Candidate, weights: Weights
    ) -> Released:
        run = client.get_run(candidate.mlflow_run_id)
        about_model = f"Models of recipe {candidate.recipe} for tenant {candidate.tenant}."
        with self.asking("RESOURCE_ALREADY_EXISTS"):
            client.create_registered_model(self.name, description=about_model)
        version = client.create_model_version(
            self.name,
            f"{run.info.artifact_uri}/{FILES}",
            candidate.mlflow_run_id,
            tags=tags_of(candidate, weights),
            description=candidate.description[:_MOST_DESCRIPTION_CHARS],
        )
        released = self._released(version, {})
        write_json(self._digest_file(released), released.sha256)
        return released

    def versions(self) -> list[Released]:
        """All versions, the newest first."""
        with self.asking() as client:
            aliases = self.aliases()
            in_mlflow = all_pages(
                lambda token: client.search_model_versions(f"name='{self.name}'", page_token=token)
            )
        versions: list[Released] = []
        for version in in_mlflow:
            # Somebody may have registered another version by hand, which lacks our tags.
            if "identity" in version.tags:
                versions.append(self._released(version, aliases))
        return sorted(versions, key=lambda version: int(version.version), reverse=True)

    def _of_identity(self, identity: str) -> Released | None:
        for version in self.versions():
            if version.identity == identity:
                return version
        return None

    def version(self, version: str) -> Released:
        """The version of that number; raises `ConfigError` where there is none."""
        in_mlflow: ModelVersion | None = None
        with self.asking("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE") as client:
            in_mlflow = client.get_model_version(self.name, version)
        if in_mlflow is None or "identity" not in in_mlflow.tags:
            newest = ", ".join(released.version for released in self.versions()[:5]) or "none"
            raise ConfigError(
                f"release `{version}` of {self.name}: there is no such version; newest: {newest}"
            )
        return self._released(in_mlflow, self.aliases())

    def aliases(self) -> dict[Alias, str]:
        """The version that each alias names; this is the cheapest thing to poll."""
        versions: Mapping[str, str] = {}
        with self.asking("RESOURCE_DOES_NOT_EXIST") as client:
            # MLflow's database store returns aliases only here; a search leaves them out.
            versions = client.get_registered_model(self.name).aliases
        return {alias: str(versions[alias]) for alias in ALIASES if alias in versions}

    def released(self, alias: Alias) -> Released | None:
        version = self.aliases().get(alias)
        return self.version(version) if version else None

    def named(self, name: str) -> Released:
        """The version with this number or alias; raises `ConfigError` where there is none."""
        for alias in ALIASES:
            if alias == name:
                released = self.released(alias)
                if released is None:
                    hint = "see `qinglan release list`"
                    raise ConfigError(f"{self.name}: no version is its {name}; {hint}")
                return released
        return self.version(name)

    def promote(self, version: str, *, force_reason: str = "") -> Released:
        """Make a version the champion; the champion before it becomes the previous one.

        Raises:
            ConfigError: the gate said no and nothing forces it.
        """
        with self._change() as client:
            released = self._releasable(version, force_reason)
            aliases = self.aliases()
            old = aliases.get("champion", "")
            if force_reason:
                self._set_tags(version, forced=force_reason)
            if old != version:
                replaces = f", replaces version {old}" if old else ""
                self._note(released, f"promoted{replaces}{_although(released, force_reason)}")
                self._replace(released, old)
            if aliases.get("challenger") == version:
                client.delete_registered_model_alias(self.name, "challenger")
            return self.version(version)

    def assign_alias(
        self, version: str, role: Literal["champion", "challenger", "none"], instead_of: str | None
    ) -> Released:
        """Give a version that passed the gate its alias, once.

        It gets none where another model than `instead_of` is champion by now.
        """
        with self._change():
            released = self.version(version)
            if released.alias_is_decided or released.verdict != "promote":
                return released
            aliases = self.aliases()
            champion = aliases.get("champion")
            twin = ""
            if role != "none" and champion != version:
                twin = self._same_weights(released)
            if twin:
                role = "none"
                hint = f"`qinglan release promote {version}` serves it all the same"
                self._note(released, f"stays without an alias: {twin}; {hint}")
            elif role != "none":
                obstacle = _obstacle(version, role, instead_of, aliases)
                if obstacle:
                    # It is not settled: another evaluation may give it an alias.
                    self._note(released, f"stays without an alias: {obstacle}")
                    return self.version(version)
                if role == "champion":
                    self.promote(version)
                elif champion != version:
                    self.challenge(version)
            self._set_tags(version, settled=role)
            return self.version(version)

    def redecide(self, version: str, decision: Decision) -> Released:
        """Keep a person's decision.

        Raises:
            ConfigError: another person has decided meanwhile.
        """
        with self._change():
            released = self.version(version)
            if released.verdict != "undecided":
                raise ConfigError(
                    f"release {version} of {self.name}: is decided by now: {released.sentence}"
                )
            return self._redecide(released, decision)

    def challenge(self, version: str, *, force_reason: str = "") -> Released:
        """Make a version the challenger, for a canary.

        Raises:
            ConfigError: the gate said no and nothing forces it, or it is the champion.
        """
        with self._change() as client:
            released = self._releasable(version, force_reason)
            if "champion" in released.aliases:
                raise ConfigError(
                    f"release {version} of {self.name}: is the champion, so it can't challenge it"
                )
            if "challenger" not in released.aliases:
                self.withdraw_challenger(f"version {version} took its place")
                self._note(released, f"became the challenger{_although(released, force_reason)}")
                if force_reason:
                    self._set_tags(version, forced=force_reason)
                # An earlier canary of this version may have ended so.
                self._drop_tags(version, "withdrawn")
                client.set_registered_model_alias(self.name, "challenger", version)
            return self.version(version)

    def withdraw_challenger(self, reason: str, version: str | None = None) -> Released | None:
        """End a canary; where a version is given, only that version's.

        Returns:
            The version that lost its alias, None where there was none.
        """
        with self._change() as client:
            challenger = self.aliases().get("challenger")
            # Meanwhile another canary may have begun, which its own verdict ends.
            if challenger is None or version not in (None, challenger):
                return None
            self._note(self.version(challenger), f"withdrawn: {reason}")
            self._set_tags(challenger, withdrawn=reason)
            client.delete_registered_model_alias(self.name, "challenger")
            return self.version(challenger)

    def roll_back(self, reason: str) -> Released:
        """Exchange champion and previous; returns the new champion.

        A version that was rolled back comes back by `promote` only: a second rollback does not
        undo the first.
        """
        with self._change() as client:
            is_repaired = self._repair()
            aliases = self.aliases()
            bad = aliases.get("champion")
            good = aliases.get("previous")
            if bad is None or good is None:
                hint = "see `qinglan release list`"
                raise ConfigError(f"{self.name}: has no previous champion to return to; {hint}")
            previous = self.version(good)
            champion = self.version(bad)
            if previous.rolled_back_to == bad:
                if is_repaired:
                    # This very rollback was interrupted before, and the repair completed it.
                    return champion
                hint = f"`qinglan release promote {good}` returns to it all the same"
                raise ConfigError(
                    f"{self.name}: version {good} was itself rolled back to {bad}, "
                    f"at {previous.rolled_back_at}; {hint}"
                )
            self._require_weights(previous)
            # The tags come before the aliases: `_repair` completes an interrupted rollback by them.
            self._note(champion, f"rolled back to version {good}: {reason}")
            self._set_tags(bad, rolled_back=reason, rolled_back_to=good, rolled_back_at=_utc_now())
            self._note(previous, f"champion again, after version {bad}: {reason}")
            client.set_registered_model_alias(self.name, "champion", good)
            client.set_registered_model_alias(self.name, "previous", bad)
            return self.version(good)

    def folder(self, released: Released, say: Callable[[str], object] = _LOG.warning) -> Path:
        """The merged weights with their digest checked, restored from MLflow if need be.

        Raises:
            ArtifactError: they can't be had, or MLflow's digest is not the one that this site
                recorded.
        """
        self._check_digest(released, say)
        restored = self.state / "models" / self.name / released.version
        for folder in (released.folder, restored):
            if folder.is_dir() and sha256_of(folder) == released.sha256:
                return folder
        if released.weights != "mlflow":
            problem = "was changed" if released.folder.is_dir() else "is gone"
            why = "its weights are larger than release.max_artifact_mb, so MLflow has none"
            raise ArtifactError(
                f"release {released.version} of {self.name}: {released.folder} {problem}, "
                f"and {why}; put that folder back, {ADVICE}"
            )
        restored.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(restored.parent / ".lock"):
            # Another process may have restored them while this one waited for the lock.
            if not restored.is_dir() or sha256_of(restored) != released.sha256:
                with self.asking() as client:
                    restore(client, released, restored)
            return restored

    def _digest_file(self, released: Released) -> Path:
        return self.state / "registry" / self.name / f"{released.version}.json"

    def _check_digest(self, released: Released, say: Callable[[str], object]) -> None:
        """Compare MLflow's digest with the one that this site recorded.

        Whoever can write to MLflow could exchange weights and digest together.
        """
        file = self._digest_file(released)
        where = f"release {released.version} of {self.name}"
        if not file.exists():
            write_json(file, released.sha256)
            say(
                f"{where}: this site had no record of its weights' digest, "
                f"and keeps MLflow's in {file} from now on"
            )
        elif json.loads(file.read_text(encoding="utf-8")) != released.sha256:
            problem = f"the digest that MLflow has of its weights is not the one in {file}"
            hint = f"find out who changed it, and remove that file if it was meant, {ADVICE}"
            raise ArtifactError(f"{where}: {problem}; {hint}")

    def read_champion(self) -> Released | None:
        """The champion, with weights that can be loaded; large ones are not hashed."""
        if is_missing_database(self.uri):
            return None
        champion = self.released("champion")
        if champion and (champion.weights == "mlflow" or not champion.folder.is_dir()):
            self.folder(champion)
        return champion

    def _redecide(self, released: Released, decision: Decision) -> Released:
        if (released.verdict, released.sentence) == (decision.verdict, decision.sentence):
            return released
        self._note(released, f"decided anew: {decision.sentence}")
        is_demoted = released.verdict == "promote" and decision.verdict != "promote"
        # The verdict of a version that has had its alias stays: only users and canaries change
        # what serves.
        if not (released.alias_is_decided and is_demoted):
            self._set_tags(released.version, **decision_tags(decision))
        return self.version(released.version)

    def _same_weights(self, released: Released) -> str:
        """Why another version with the same weights stands in the way; empty where none does."""
        twins = [
            version
            for version in self.versions()
            if version.sha256 == released.sha256 and version.version != released.version
        ]
        for twin in twins:
            if "champion" in twin.aliases:
                return f"version {twin.version}, the champion, has the same weights"
        for twin in twins:
            if twin.rolled_back_to:
                return f"version {twin.version} has the same weights and was rolled back"
            if twin.withdrawn:
                return f"version {twin.version} has the same weights and was withdrawn"
        return ""

    def _replace(self, new: Released, old: str) -> None:
        """Make `new` the champion, and version `old`, if there is one, the previous one."""
        self._set_tags(new.version, replaced=old)
        self._drop_tags(new.version, "rolled_back", "rolled_back_to", "rolled_back_at", "withdrawn")
        # The alias `previous` is set before `champion`, so that there always is a champion.
        if old:
            old_champion = self.version(old)
            if not old_champion.promoted_at:
                # Its own promotion was killed just before it could say so.
                self._set_tags(old, promoted_at=_utc_now())
            # With the same weights under a later decision, a rollback is to return to others.
            if old_champion.sha256 != new.sha256:
                self._client.set_registered_model_alias(self.name, "previous", old)
        self._client.set_registered_model_alias(self.name, "champion", new.version)
        # The tag says what is true by now, so it comes last.
        self._set_tags(new.version, promoted_at=_utc_now())

    def _repair(self) -> bool:
        """Complete what a killed process left half done; returns whether there was anything."""
        aliases = self.aliases()
        champion = aliases.get("champion")
        if champion is None:
            return False
        doubled: list[Alias] = []
        if aliases.get("challenger") == champion:
            doubled.append("challenger")
            self._client.delete_registered_model_alias(self.name, "challenger")
        if aliases.get("previous") == champion:
            doubled.append("previous")
            before = self._before(champion)
            if before:
                self._client.set_registered_model_alias(self.name, "previous", before)
            else:
                self._client.delete_registered_model_alias(self.name, "previous")
        return bool(doubled)

    def _before(self, champion: str) -> str:
        """The version that the champion replaced, by a rollback to it, else by its promotion."""
        versions = self.versions()
        rolled_back = [version for version in versions if version.rolled_back_to == champion]
        if rolled_back:
            return max(rolled_back, key=lambda version: version.rolled_back_at).version
        return next(version.replaced for version in versions if version.version == champion)

    def _releasable(self, version: str, force_reason: str) -> Released:
        """The version, if it may serve; raises `ConfigError` where the gate said no."""
        self._repair()
        released = self.version(version)
        if released.verdict != "promote" and not force_reason:
            verdict = f"the gate said {released.verdict} ({released.sentence})"
            hint = "--force with a --reason releases it all the same"
            raise ConfigError(f"release {version} of {self.name}: {verdict}; {hint}")
        self._require_weights(released)
        return released

    def _require_weights(self, released: Released) -> None:
        """A quick check, as a rollback must not wait for the digest of 60 GB."""
        if released.weights != "mlflow" and not released.folder.is_dir():
            self.folder(released)

    def _released(self, in_mlflow: "ModelVersion", aliases: Mapping[Alias, str]) -> Released:
        version = str(in_mlflow.version)
        created = datetime.fromtimestamp(in_mlflow.creation_timestamp / 1000, UTC)
        released = Released.of_tags(self.name, version, created, in_mlflow.tags)
        own_aliases = tuple(alias for alias in ALIASES if aliases.get(alias) == version)
        return released.with_aliases(own_aliases)

    def _set_tags(self, version: str, **tags: str) -> None:
        for key, value in tags.items():
            self._client.set_model_version_tag(self.name, version, key, value)

    def _drop_tags(self, version: str, *names: str) -> None:
        present = self._client.get_model_version(self.name, version).tags
        for name in names:
            if name in present:
                self._client.delete_model_version_tag(self.name, version, name)

    def _note(self, released: Released, line: str) -> None:
        """Add a line to a version's history."""
        line = " ".join(line.split())
        if released.history:
            _, _, last_line = released.history[-1].partition(" ")
            if last_line == line:
                # An attempt that was interrupted has written it.
                return
        history = (*released.history, f"{_utc_now()} {line}")
        self._set_tags(released.version, history="\n".join(history))

    @cached_property
    def _lock(self) -> FileLock:
        folder = self.state / "registry"
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / f"{self.name}.lock")

    @contextmanager
    def _change(self) -> Iterator["MlflowClient"]:
        """MLflow's client, for one change at a time; a change may contain others."""
        with self._lock, self.asking() as client:
            yield client

    @contextmanager
    def asking(self, *ignored_codes: str) -> Iterator["MlflowClient"]:
        """MLflow's client for the time of a `with`.

        MLflow's errors become `ConfigError`; those with one of these codes are passed over.
        """
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


def _obstacle(
    version: str, role: Alias, instead_of: str | None, aliases: Mapping[Alias, str]
) -> str:
    """Why a version can't have its alias now; empty where it can."""
    champion = aliases.get("champion")
    if champion not in (None, instead_of, version):
        return f"version {champion} became the champion meanwhile; evaluate again"
    if role == "challenger" and aliases.get("challenger") not in (None, version):
        return f"another canary is running; `qinglan canary start {version}` takes its place"
    return ""


def _although(released: Released, force_reason: str) -> str:
    """The part of a line of the history that says why a refused version serves."""
    if not force_reason:
        return ""
    return f", although the gate said {released.verdict}: {force_reason}"


def _utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def is_missing_database(uri: str) -> bool:
    """Tell whether this is an SQLite database that does not exist, which MLflow would make."""
    path = uri.removeprefix("sqlite:///")
    is_sqlite = path != uri
    return is_sqlite and not Path(path).is_file()


def all_pages(search: Callable[[str | None], Any]) -> list[Any]:
    """All that MLflow finds; `search` takes the token of the next page."""
    page = search(None)
    entries = list(page)
    while page.token:
        page = search(page.token)
        entries += page
    return entries


def registry_of(profile: Profile, name: str = "") -> Registry:
    """The registry of the profile's own model, or of the model with that name."""
    return Registry(
        profile.tracking_uri,
        name or profile.model_name,
        profile.paths.state.resolve(),
        profile.release.max_artifact_mb,
    )


def rival_of(run: Run) -> Released | None:
    """The champion that a run's model is to beat; None before the first.

    It is the champion there was when the run first asked, so that a run which goes on after it has
    promoted its own model does not compare that with itself.
    """
    registry = registry_of(run.profile)
    path = run.directory / RIVAL_FILE
    pinned: dict[str, str] = {}
    if path.exists():
        pinned = json.loads(path.read_text(encoding="utf-8"))
    if pinned.get("name") == registry.name:
        if not pinned["version"]:
            return None
        champion = registry.version(pinned["version"])
        if champion.sha256 == pinned["sha256"]:
            return champion
    current = registry.released("champion")
    pinned = {"name": registry.name, "version": "", "sha256": ""}
    if current:
        pinned |= {"version": current.version, "sha256": current.sha256}
    write_json(path, pinned)
    return current


def champion_of(run: Run) -> Released | None:
    """The champion of `rival_of`, with its weights where they can be loaded."""
    champion = rival_of(run)
    if champion is None:
        return None
    return champion.with_folder(registry_of(run.profile).folder(champion))
