"""The registry on SQLite: versions, aliases, interrupted changes, and weights that are gone."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doubles import KilledError
from fixture_types import ProfileOf
from mlflow import MlflowClient
from registered import Models

from qinglan.errors import ArtifactError, ConfigError
from qinglan.registry import Candidate, Registry, champion_of, prompt_digest, rival_of
from qinglan.runs.artifacts import sha256_of
from qinglan.runs.run import open_run
from qinglan.runs.schema_version import read_record


@pytest.fixture
def site(database: str, tmp_path: Path) -> Models:
    return Models(database, f"qinglan.{tmp_path.name}", tmp_path)


class Dying:
    """A client that is killed instead of its n-th write: of an alias, or of anything."""

    def __init__(self, client: MlflowClient, nth: int, writes: tuple[str, ...]) -> None:
        self._client = client
        self._writes_to_come = nth
        self._writes = writes

    def __getattr__(self, name: str) -> Any:
        if name.endswith(self._writes):
            self._writes_to_come -= 1
            if self._writes_to_come == 0:
                raise KilledError
        return getattr(self._client, name)


ALIAS = ("registered_model_alias",)
ANYTHING = ("registered_model_alias", "model_version_tag")


def dying(site: Models, nth: int, writes: tuple[str, ...] = ALIAS) -> Registry:
    registry = site.open()
    registry.__dict__["_client"] = Dying(site.client, nth, writes)
    return registry


def test_a_version_is_described_by_its_tags_and_keeps_its_files(site: Models, tmp_path: Path):
    adapter = tmp_path / "checkpoint"
    adapter.mkdir()
    for name in (
        "adapter_model.safetensors",
        "adapter_config.json",
        "optimizer.pt",
        "rng_state.pth",
    ):
        (adapter / name).write_text("{}")
    candidate = site.candidate(adapters={"sft": adapter})
    released = site.registry.register(candidate)
    assert site.registry.version("1") == released
    assert released.arm == "rl"
    assert released.sha256 == candidate.model.sha256
    assert released.verdict == "promote"
    assert released.aliases == ()
    assert released.run_id == "run-1"
    assert released.dataset_version == "d1"
    assert released.weights == "mlflow"
    in_mlflow = site.client.get_model_version(site.name, "1")
    assert "Release the RL student: all 0 rules hold." in in_mlflow.description
    assert "top1 0.900" in in_mlflow.description
    folder = Path(site.client.download_artifacts(candidate.mlflow_run_id, "release"))
    assert read_record(Candidate, folder / "release.json") == candidate
    assert (folder / "model" / "model.safetensors").read_text() == "one"
    files = [path.name for path in sorted((folder / "adapters" / "sft").iterdir())]
    assert files == ["adapter_config.json", "adapter_model.safetensors"], "nothing of the optimizer"
    assert site.registry.register(site.candidate()).version == "1"
    assert site.registry.register(site.candidate(gate={"max_cost_ratio": 0.4})).version == "2"


def test_a_challenger_is_promoted_or_withdrawn(site: Models):
    site.promote("one")
    site.register("two")
    assert site.registry.challenge("2").aliases == ("challenger",)
    with pytest.raises(ConfigError, match="is the champion"):
        site.registry.challenge("1")
    assert site.registry.withdraw_challenger("meant for another canary", "1") is None
    withdrawn = site.registry.withdraw_challenger("too many errors", "2")
    assert withdrawn
    assert withdrawn.history[-1].endswith("withdrawn: too many errors")
    assert site.registry.withdraw_challenger("again") is None
    site.registry.challenge("2")
    site.registry.promote("2")
    champion = site.registry.promote("2")
    assert site.registry.aliases() == {"champion": "2", "previous": "1"}
    assert champion.history[-1].endswith("promoted, replaces version 1")


def test_what_did_not_pass_serves_only_for_a_reason(site: Models):
    site.registry.register(site.candidate(verdict="refuse"))
    for change in (site.registry.promote, site.registry.challenge):
        with pytest.raises(ConfigError, match=r"the gate said refuse.*--force"):
            change("1")
    assert site.registry.aliases() == {}
    reason = "the cost is accepted"
    assert site.registry.challenge("1", force_reason=reason).history[-1].endswith(reason)
    assert reason in site.registry.promote("1", force_reason=reason).history[-1]
    tags = site.client.get_model_version(site.name, "1").tags
    assert tags["forced"] == reason
    assert tags["reasons"] == "cost: it costs 90% of what the teacher costs"


def test_a_rollback_returns_to_the_previous_champion_once(site: Models):
    site.promote("one")
    with pytest.raises(ConfigError, match="no previous champion"):
        site.registry.roll_back("why not")
    site.promote("two")
    assert site.registry.roll_back("it was slow").version == "1"
    assert site.registry.aliases() == {"champion": "1", "previous": "2"}
    assert site.registry.version("2").history[-1].endswith("rolled back to version 1: it was slow")
    with pytest.raises(ConfigError, match="version 2 was itself rolled back"):
        site.registry.roll_back("again")
    site.registry.promote("2")
    assert site.registry.roll_back("slow indeed").version == "1"
    site.registry.promote("2")
    third = site.registry.register(site.candidate("two", gate={"approval": "none"})).version
    site.registry.promote(third)
    assert site.registry.aliases() == {"champion": "3", "previous": "1"}, (
        "the same weights under a new decision"
    )


@pytest.mark.parametrize(
    ("nth", "then"), [(1, "promote"), (2, "promote"), (3, "promote"), (2, "roll_back")]
)
def test_a_killed_promotion_leaves_a_champion_and_is_completed_or_rolled_back(
    site: Models, nth: int, then: str
):
    site.promote("one", "two")
    site.register("three")
    site.registry.challenge("3")
    with pytest.raises(KilledError):
        dying(site, nth).promote("3")
    assert site.registry.aliases()["champion"] in ("2", "3")
    if then == "roll_back":
        assert site.registry.roll_back("slow").version == "1"
        return
    site.registry.promote("3")
    assert site.registry.aliases() == {"champion": "3", "previous": "2"}


@pytest.mark.parametrize("nth", [1, 2])
def test_a_killed_rollback_leaves_a_champion_and_is_completed(site: Models, nth: int):
    site.promote("one", "two")
    with pytest.raises(KilledError):
        dying(site, nth).roll_back("slow")
    assert site.registry.aliases()["champion"] in ("1", "2")
    assert site.registry.roll_back("slow").version == "1"
    assert site.registry.aliases() == {"champion": "1", "previous": "2"}


@pytest.mark.parametrize(
    ("nth", "chosen"), [*((nth, None) for nth in range(1, 7)), (5, "1"), (6, "1")]
)
def test_a_promotion_that_was_killed_while_it_settled_is_completed_but_never_repeated(
    site: Models, nth: int, chosen: str | None
):
    site.register("one", "two")
    site.registry.assign_alias("1", "champion", None)
    with pytest.raises(KilledError):
        dying(site, nth, ANYTHING).assign_alias("2", "champion", "1")
    if chosen:  # by a person, after the kill
        site.registry.promote(chosen)
    elif site.registry.aliases()["champion"] == "2":
        site.registry.roll_back("slow")
    else:
        assert site.registry.assign_alias("2", "champion", "1").aliases == ("champion",)
        assert site.registry.aliases()["previous"] == "1"
        return
    assert site.registry.assign_alias("2", "champion", "1").aliases == ("previous",)
    assert site.registry.aliases() == {"champion": "1", "previous": "2"}


def test_a_canary_that_ended_before_its_version_was_settled_is_not_started_again(site: Models):
    site.register("one", "two")
    site.registry.assign_alias("1", "champion", None)
    with pytest.raises(KilledError):
        dying(site, 3, ANYTHING).assign_alias("2", "challenger", "1")
    site.registry.withdraw_challenger("too many errors")
    site.registry.assign_alias("2", "challenger", "1")
    assert site.registry.aliases() == {"champion": "1"}


def test_a_canary_is_not_ended_by_the_next_nights_model_but_by_a_person(site: Models):
    site.register("one", "two", "three")
    site.registry.promote("1")
    site.registry.assign_alias("2", "challenger", "1")
    without_alias = site.registry.assign_alias("3", "challenger", "1")
    assert "another canary is running" in without_alias.history[-1]
    assert site.registry.aliases()["challenger"] == "2"
    site.registry.challenge("3")
    assert site.registry.version("2").history[-1].endswith("withdrawn: version 3 took its place")


def test_who_has_a_place_keeps_it_whatever_is_decided_later(site: Models):
    site.register("one")
    site.registry.assign_alias("1", "champion", None)
    released = site.registry.register(site.candidate("one", verdict="refuse"))
    assert released.verdict == "promote"
    assert released.aliases == ("champion",)
    decision = "Do not release the RL student: it costs 90% of what the teacher costs."
    assert released.history[-1].endswith(f"decided anew: {decision}")


def test_of_two_people_who_decide_at_once_the_first_has_decided(site: Models):
    site.registry.register(site.candidate("one", verdict="undecided"))
    site.registry.redecide("1", site.candidate(verdict="refuse").decision)
    with pytest.raises(
        ConfigError, match=r"release 1 of .*: is decided by now: Do not release the RL student"
    ):
        site.registry.redecide("1", site.candidate(verdict="promote").decision)
    assert site.registry.version("1").verdict == "refuse"


def test_a_run_keeps_the_champion_that_it_began_with(site: Models, profile_of: ProfileOf):
    profile = profile_of(tracking={"uri": site.uri}, release={"name": site.name})
    with open_run(profile, "evaluate") as run:
        assert rival_of(run) is None
        site.promote("one")
        site.register("two")
        assert champion_of(run) is None
    with open_run(profile, "evaluate", fresh=True) as run:
        first = rival_of(run)
        site.registry.promote("2")
        again = rival_of(run)
        assert first
        assert first.version == "1"
        assert again
        assert again.version == "1"
        release = run.profile.release.model_copy(update={"name": f"{site.name}.other"})
        profile_of_other_model = run.profile.model_copy(update={"release": release})
        run_of_other_model = run.model_copy(update={"profile": profile_of_other_model})
        assert rival_of(run_of_other_model) is None, "another model's champion is another one"


def test_withdrawn_weights_get_no_place_by_another_evaluation(site: Models):
    site.register("one", "two")
    site.registry.assign_alias("1", "champion", None)
    site.registry.assign_alias("2", "challenger", "1")
    site.registry.withdraw_challenger("slow")
    again = site.registry.register(site.candidate("two", seed=2)).version
    assert again == "3"
    settled = site.registry.assign_alias(again, "challenger", "1")
    assert settled.settled == "none"
    assert settled.aliases == ()
    assert "version 2 has the same weights and was withdrawn" in settled.history[-1]
    assert site.registry.aliases() == {"champion": "1"}


def test_two_at_once_make_one_rollback(site: Models):
    site.promote("one", "two")

    def roll_back(_: int) -> str:
        try:
            return site.open().roll_back("slow").version
        except ConfigError:
            return "refused"

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(roll_back, range(2))) == ["1", "refused"]


@pytest.mark.parametrize("how", ["gone", "changed"])
def test_weights_are_restored_from_mlflow(site: Models, how: str):
    released = site.registry.register(site.candidate())
    (released.folder / "model.safetensors").write_text("other")
    if how == "gone":
        released.folder.rename(released.folder.with_name("away"))
    restored = site.registry.folder(released)
    assert restored == site.folder / "state" / "models" / site.name / "1"
    assert (restored / "model.safetensors").read_text() == "one"


def test_weights_exchanged_together_with_mlflows_digest_are_not_served(site: Models):
    released = site.registry.register(site.candidate())
    (released.folder / "model.safetensors").write_text("another model")
    site.client.set_model_version_tag(site.name, "1", "sha256", sha256_of(released.folder))
    with pytest.raises(
        ArtifactError, match=r"release 1 of .* digest .* is not the one in .*; find out who changed"
    ):
        site.registry.folder(site.registry.version("1"))


def test_a_site_without_a_record_of_a_version_serves_it_and_keeps_one(site: Models):
    released = site.registry.register(site.candidate())
    elsewhere = replace(site.registry, state=site.folder / "another machine")
    lines: list[str] = []
    for _ in range(2):
        assert elsewhere.folder(released, lines.append) == released.folder
    (line,) = lines
    assert line.startswith(
        f"release 1 of {site.name}: this site had no record of its weights' digest"
    )
    with pytest.raises(ArtifactError, match="is not the one in"):
        elsewhere.folder(released.model_copy(update={"sha256": "0" * 64}))


def test_large_weights_stay_where_they_are(site: Models):
    registry = site.open(max_artifact_mb=1e-6)
    candidate = site.candidate()
    released = registry.register(candidate)
    assert released.weights == "path"
    files = site.client.list_artifacts(candidate.mlflow_run_id, "release/model")
    assert [Path(file.path).name for file in files] == ["tokenizer.json"]
    released.folder.rename(released.folder.with_name("away"))
    with pytest.raises(ArtifactError, match=r"is gone.*put that folder back"):
        registry.folder(released)
    with pytest.raises(ArtifactError, match="is gone"):
        registry.promote("1")


def test_a_server_that_is_away_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match=r"MLflow at http://127\.0\.0\.1:9"):
        Registry("http://127.0.0.1:9", "m", tmp_path).versions()


def test_the_prompts_digest_changes_with_what_the_student_reads(profile_of: ProfileOf):
    assert prompt_digest(profile_of()) == prompt_digest(profile_of(name="other"))
    assert prompt_digest(profile_of()) != prompt_digest(profile_of(tenant={"domain": "保险"}))
