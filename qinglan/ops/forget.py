"""`qinglan forget`: takes people's rows out of everything that a site keeps, and leaves tombstones.

First the rows that tombstones name are looked for, with their texts. Then each file loses what is
of them: a record (a line, a table's row, an entry of a JSON list) that has such a row's id or one
of its texts, and elsewhere the text itself. A text that another row has too is nobody's alone and
stays there; short texts go with their records only. JSON lines come last, as the rows themselves
are in them: what a killed process left is completed by the next one.
"""

import json
import os
import re
import sqlite3
import stat
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qinglan.clients.roles import site_ledger
from qinglan.config import EMBEDDED, Profile
from qinglan.data.forgotten import Tombstones
from qinglan.data.sources.excel import CORRUPT, load_book
from qinglan.data.sources.records import FIELDS, InputColumns
from qinglan.data.versions import (
    CARD,
    CARD_DATA,
    INDEX,
    PINS,
    VERSION_FILE,
    Version,
    describe_again,
)
from qinglan.errors import ConfigError, QinglanError, TeacherError, first_line
from qinglan.evaluation.models import Report
from qinglan.evaluation.report.html import render_html
from qinglan.ledger import Ledger
from qinglan.ops.prefect.server import LOCK_FILE, PrefectServer, find_server, prefect_home
from qinglan.ops.run_status import REPORT_FILE
from qinglan.ops.up.site import only_one
from qinglan.recipes import get_recipe
from qinglan.recipes.requests import distill_requests, extract_requests, judge_requests
from qinglan.rows import DIALOGUE, INPUT_REASONS, Row, normalise, row_id
from qinglan.runs.artifacts import (
    MANIFEST,
    REFERENCE,
    Artifact,
    hash_of,
    sha256_of,
    write_json,
    written_whole,
)
from qinglan.runs.locks import removal_lock, require_no_process
from qinglan.runs.processes import Say
from qinglan.runs.run import RUN_FILE
from qinglan.text import forms_of, pattern_of

MARK = "[forgotten]"
BACKUPS_FILE = "backups.txt"
"""In the state folder: where backups were put, a line each."""
SHORTEST = 6
"""Characters, by `normalise`, of a text that is searched for: shorter ones are in other people's
texts by chance."""
_ID = re.compile(r'"(?:redteam-)?(?:regression-)?([0-9a-f]{16})[-"]')
_CASE = re.compile("^(redteam-)?(regression-)?")
_ID_KEYS = ("id", "row_id", "case_id", "row", "")
"""Keys whose value says whose record it is; the last stands for a list's entries."""
_CONTEXT = ("query", "profile", "history")
_FIELDS = set(FIELDS) - {DIALOGUE}
_ASKING = {"recipe", "tenant", "teacher", "answerer", "judge", "extract"}
"""Settings that the ledger's keys depend on."""
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".distcp", ".gguf")
_BESIDE_A_DATABASE = ("-wal", "-shm", "-journal")
_REMOVE_TRACES = "DELETE FROM trace_info WHERE request_id IN (SELECT trace_id FROM spans WHERE instr(content, ?))"
"""Of MLflow: an answer need not quote the question, and a preview cuts a long one off."""
_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%'"
_LEDGER = "ledger.db"
SQLITE, SQLITE_WAIT_S = b"SQLite format 3\0", 60.0
_CACHES = ("~/.cache/huggingface/datasets", "~/.cache/modelscope/hub/datasets")


@dataclass
class Forgotten:
    removed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How much, by store and kind."""
    outside: list[str] = field(default_factory=list)
    """Where these rows may be as well."""
    notes: list[str] = field(default_factory=list)
    """What could not be done."""

    @property
    def lines(self) -> list[str]:
        return [f"{count:,} {what} in {store}" for (store, what), count in self.removed.items()]


def forget(
    profile: Profile,
    rows: Collection[str],
    questions: Collection[str],
    say: Say,
    *,
    dry_run: bool = False,
) -> Forgotten:
    """Remove the rows with these ids, and all that ask one of these questions; ConfigError where a
    process runs."""
    state, runs = profile.paths.state.resolve(), profile.paths.runs.resolve()
    tombstones = Tombstones.read(state).adding(rows, questions)
    if dry_run:
        return apply(profile, tombstones, questions, dry_run=True)
    runs.mkdir(parents=True, exist_ok=True)
    with only_one(state, say):
        require_no_process(state, runs, but=state / LOCK_FILE)
        if folder := profile.serve.request_log.folder:
            require_no_process(Path(folder), pattern="*.partial")
        with removal_lock(runs, exclusive=True):
            return apply(profile, tombstones, questions)


def apply(
    profile: Profile,
    tombstones: Tombstones,
    questions: Collection[str] = (),
    *,
    dry_run: bool = False,
) -> Forgotten:
    """Remove what tombstones name from a site that stands still, and keep them."""
    sweep = _Sweep(profile, tombstones, questions, dry_run=dry_run)
    if tombstones.lines:
        server = find_server(
            profile.paths.state
        )  # a mistake in its address shows before anything is removed
        if not dry_run:
            tombstones.write(profile.paths.state)
        sweep.find()
        if not dry_run:  # by its id a row's other traces are found, also once its question is gone
            tombstones.adding(sweep.ids).write(profile.paths.state)
        sweep.remove()
        sweep.look_outside(server)
    return sweep.done


class _Sweep:
    def __init__(
        self, profile: Profile, tombstones: Tombstones, questions: Collection[str], *, dry_run: bool
    ) -> None:
        self._profile, self._tombstones, self._dry_run = profile, tombstones, dry_run
        self._columns = InputColumns.of(profile.data, get_recipe(profile.recipe).INPUTS).names
        texts, tenant = [each.strip() for each in questions if normalise(each)], profile.tenant.id
        self._rows = {
            text: Row(id=row_id(tenant, text), tenant=tenant, query=text, source="")
            for text in texts
        }
        """By wording and context. The questions without context may be in the ledger where no file
        has their rows."""
        plain = {row.id for row in self._rows.values()}
        self._has_row = cache(lambda row: row in plain or tombstones.has_row(row))
        self.done, self.ids, self._contexts = Forgotten(), set[str](), set[tuple[str, ...]]()
        self._requests, self._sheets, self._answers = (
            set[str](),
            set[str](),
            defaultdict[str, set[str]](set),
        )
        self._texts = set(filter(_is_long, texts))
        self._changed: dict[Path, int] = {}
        """Files, by how many rows they have lost."""
        self._by_question = any(line.kind == "question" for line in tombstones.lines)
        self._roots = {profile.paths.runs.resolve(): "runs", profile.paths.state.resolve(): "state"}
        if folder := profile.serve.request_log.folder:
            self._roots[Path(folder).resolve()] = "request log"
        databases = {"MLflow": profile.tracking_uri.removeprefix("sqlite:///")}
        databases |= {"Prefect": f"{home}/prefect.db"} if (home := prefect_home()) else {}
        self._roots |= {
            Path(each).resolve(): name for name, each in databases.items() if Path(each).is_file()
        }
        self._files = sorted(_files_of(self._roots), key=lambda path: (_is_jsonl(path), path))

    # What the tombstones name

    def find(self) -> None:
        """The rows' ids, texts and requests; and which texts are theirs alone."""
        for line in self._lines():
            asks = self._by_question and self._tombstones.has_question(self._query(line))
            if asks or any(map(self._has_row, _ID.findall(line))):
                self._note(_parsed(line), asks=asks)
        self._match(self._texts)
        shared = set[str]()
        for line in self._lines():
            is_row = self._pattern.search(line) and self._cells(record := _parsed(line))
            if is_row and not self._is_one(record, by_text=False):
                shared |= {
                    text for text in self._texts if any(form in line for form in forms_of(text))
                }
        self._match(self._texts - shared)
        if shared:
            self.done.outside.append(
                f"other rows: {len(shared)} of the texts are theirs as well, and stay in them"
            )

    def _lines(self) -> Iterator[str]:
        for path in filter(_is_jsonl, self._files):
            yield from path.read_text(encoding="utf-8", errors="replace").split("\n")

    def _match(self, texts: Collection[str]) -> None:
        self._alone, self._pattern = frozenset(texts), pattern_of(texts)
        self._traces = re.compile("|".join([*self.ids, self._pattern.pattern]))
        self._bytes = re.compile(self._traces.pattern.encode())

    def _query(self, line: str) -> str:
        may_be_row = '"query"' in line or f'"{self._columns["query"]}"' in line
        return self._cells(_parsed(line)).get("query", "") if may_be_row else ""

    def _cells(self, record: Any) -> dict[str, str]:
        """The texts of a row, ours or of a workbook's columns; nothing where it is none."""
        if not isinstance(record, dict):
            return {}
        cells = {
            name: record.get(name if "query" in record else self._columns[name])
            for name in _CONTEXT
        }
        cells |= {
            field: record.get(column)
            for field, column in self._columns.items()
            if field not in _FIELDS
        }
        cells |= record.get("inputs") or {}
        found = {name: text.strip() for name, text in cells.items() if isinstance(text, str)}
        return found if found.get("query") else {}

    def _note(self, record: Any, *, asks: bool) -> None:
        named = {
            each
            for key, text in _strings(record)
            if key in _ID_KEYS and self._has_row(each := _row_id(text))
        }
        self.ids |= named
        # Else it is another's record, which only refers to one of theirs: as its near-duplicate's
        # group.
        if not isinstance(record, dict) or not (named or asks):
            return
        if cells := self._cells(record):
            self._texts |= set(filter(_is_long, cells.values()))
            self._contexts.add(_context(cells))
        self._requests |= {*(record.get("requests") or ()), record.get("answer_request")} - {None}
        self._sheets |= {record["file"]} if "fingerprint" in record else set()
        if isinstance(record.get("text"), str):  # a sample of RL
            self._answers[str(record.get("row_id"))].add(record["text"])
        with suppress(ValidationError):
            row = Row.model_validate(record)
            if row.reason not in INPUT_REASONS:  # else its id is no question's
                self.ids.add(row.id)
                self._rows[hash_of(row.id, row.query, row.profile, row.history, row.inputs)] = row
                self._answers[row.id].add(row.answer or "")

    def _is_one(self, record: Any, *, by_text: bool = True) -> bool:
        """Is it one of the rows, or about one?"""
        for key, text in _strings(record):
            if (key in _ID_KEYS and _row_id(text) in self.ids) or (
                by_text and self._pattern.search(text)
            ):
                return True
        cells = self._cells(record)
        has_id = bool(cells) and "id" in record and record.get("reason") not in INPUT_REASONS
        return bool(cells) and not has_id and _context(cells) in self._contexts

    # Removing it

    def remove(self) -> None:
        self._drop_answers()
        for path in self._files:
            with self._noting(path):
                what, count = self._clean(path)
                if count:
                    self.done.removed[self._store(path), what] += count
        if not self._dry_run:
            self._put_right()

    @contextmanager
    def _noting(self, what: object) -> Iterator[None]:
        """Go on with the rest after what can't be done."""
        try:
            yield
        except (QinglanError, *CORRUPT, sqlite3.Error) as error:
            self.done.notes.append(f"{what}: {first_line(error)}")

    def _drop_answers(self) -> None:
        """From the ledger: what teacher and judge answered about these rows, and what quotes
        them."""
        if not (self._profile.ledger.url_env or (self._profile.paths.state / _LEDGER).exists()):
            return
        self.done.outside.append(
            "the ledger: answers to wordings, contexts and prompts that no file here has"
        )
        with self._noting("ledger"), site_ledger(self._profile) as ledger:
            for profile in self._profiles():
                with suppress(ConfigError):  # it names no answerer
                    self._note_requests(profile, ledger)
            self._requests |= ledger.requests_quoting(
                {form for text in self._alone for form in forms_of(text)}
            )
            found = (
                ledger.get_many(self._requests)
                if self._dry_run
                else ledger.drop_all(self._requests)
            )
            self.done.removed["ledger", "answers"] += len(found)

    def _note_requests(self, profile: Profile, ledger: Ledger) -> None:
        """What a profile's models are asked about the rows, the judge also about answers that only
        the ledger has."""
        asked, judged, read = (
            distill_requests(profile),
            judge_requests(profile),
            extract_requests(profile),
        )
        for row in self._rows.values():
            with suppress(
                LookupError
            ):  # the recipe needs inputs that a question alone does not have
                hashes = {each.request_hash for each in asked(row).values()}
                self._requests |= hashes
                about = [read(row), *(judged(row, text) for text in self._answers[row.id])]
                for answer in ledger.get_many(hashes).values():
                    with suppress(TeacherError):  # of no use, so that nobody judged it
                        text = get_recipe(profile.recipe).parse_answer(answer.text)
                        about.append(judged(row.model_copy(update={"answer": text}), text))
                self._requests |= {each.request_hash for each in about if each}

    def _profiles(self) -> list[Profile]:
        """This one and those of the runs, whose prompts and models may have been others, once for
        each teacher."""
        found = [self._profile]
        for path in self._profile.paths.runs.glob(f"*/{RUN_FILE}"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                found.append(Profile.model_validate(json.loads(path.read_bytes())["profile"]))
        teachers = [
            (each, teacher)
            for each in found
            for teacher in (each.teacher, *each.compare.teachers.values())
        ]
        asking = [each.model_copy(update={"teacher": teacher}) for each, teacher in teachers]
        return list(
            {
                hash_of(each.model_dump(mode="json", include=_ASKING)): each for each in asking
            }.values()
        )

    def _clean(self, path: Path) -> tuple[str, int]:
        """What kind of thing was removed from a file, and how much."""
        if clean := {".parquet": self._clean_parquet, ".xlsx": self._clean_workbook}.get(
            path.suffix
        ):
            return "rows", clean(path)
        content = path.read_bytes()
        if content.startswith(SQLITE):
            return "values", self._clean_database(path)
        if _is_jsonl(path):
            return "rows", self._clean_lines(path, content.decode(errors="surrogateescape"))
        if not self._bytes.search(content):
            return "", 0
        if path.suffix == ".arrow":  # an engine's copy of the training rows; it makes another one
            return "rows", self._write(path, "", 1)
        text = content.decode(errors="surrogateescape")
        if path.suffix == ".json":
            text, count = self._clean_json(json.loads(text), indent=1)
            return "entries", self._write(path, text + "\n", count)
        if path.suffix in (".md", ".csv"):
            lines = text.split("\n")
            kept = [line for line in lines if not self._traces.search(line)]
            return "lines", self._write(path, "\n".join(kept), len(lines) - len(kept))
        return "texts", self._write(path, *self._pattern.subn(MARK, text))

    def _clean_lines(self, path: Path, text: str) -> int:
        kept, rows, changes = list[str](), 0, 0
        for line in text.split("\n"):
            has_trace = self._traces.search(line) is not None
            record = _parsed(line) if has_trace or self._query(line) else None
            if record is not None and self._is_one(record):
                rows += 1
                continue
            cleaned, count = line, 0
            if has_trace:
                cleaned, count = (
                    self._clean_json(record) if record else self._pattern.subn(MARK, line)
                )
            kept.append(cleaned if count else line)
            changes += count
        return self._write(path, "\n".join(kept), rows + changes, rows)

    def _clean_json(self, value: Any, indent: int | None = None) -> tuple[str, int]:
        """Without the rows' entries, and without their texts elsewhere."""
        dropped = 0

        def kept(value: Any) -> Any:
            nonlocal dropped
            if isinstance(value, dict):
                dropped += len(value.keys() & self.ids)
                return {key: kept(each) for key, each in value.items() if key not in self.ids}
            if not isinstance(value, list):
                return value
            entries = [kept(each) for each in value]
            gone = [
                self._is_one(each) if isinstance(each, dict) else str(each) in self.ids
                for each in entries
            ]
            dropped += sum(gone)
            return [each for each, is_gone in zip(entries, gone, strict=True) if not is_gone]

        text, replaced = self._pattern.subn(
            MARK, json.dumps(kept(value), ensure_ascii=False, indent=indent)
        )
        return text, dropped + replaced

    def _clean_parquet(self, path: Path) -> int:
        import pyarrow.parquet as pq

        table = pq.read_table(path)
        kept = [not self._is_one(record) for record in table.to_pylist()]
        rows = kept.count(False)
        return self._replace(
            path, lambda partial: pq.write_table(table.filter(kept), partial), rows, rows
        )

    def _clean_workbook(self, path: Path) -> int:
        with zipfile.ZipFile(path) as archive:
            if not any(self._bytes.search(archive.read(name)) for name in archive.namelist()):
                return 0
        with path.open("rb") as stream:
            book = load_book(stream)
        rows = 0
        for sheet in book.worksheets:
            found = [
                number
                for number, row in enumerate(sheet.iter_rows(values_only=True), 1)
                if self._is_one(row)
            ]
            for number in reversed(found):
                sheet.delete_rows(number)
            rows += len(found)
        return self._replace(path, book.save, rows, rows)

    def _clean_database(self, path: Path) -> int:
        """Every value of a SQLite database, and what deletions have left in its pages and its
        log."""
        changed = 0
        with closing(sqlite3.connect(path, timeout=SQLITE_WAIT_S, isolation_level=None)) as db:
            db.create_function(
                "redacted", 1, lambda value: self._pattern.sub(MARK, value), deterministic=True
            )
            tables = [] if path.name == _LEDGER else [name for (name,) in db.execute(_TABLES)]
            for table in tables:
                for _, name, *_ in db.execute(f'PRAGMA table_info("{table}")').fetchall():
                    where = f"""typeof("{name}") = 'text' AND redacted("{name}") != "{name}\""""
                    count = f'SELECT count(*) FROM "{table}" WHERE {where}'  # noqa: S608 (the database's own names)
                    changed += db.execute(count).fetchone()[0]
                    if not self._dry_run:
                        update = f'UPDATE "{table}" SET "{name}" = redacted("{name}")'  # noqa: S608
                        db.execute(f"{update} WHERE {where}")
            if "trace_info" in tables and not self._dry_run:
                db.execute(
                    "PRAGMA foreign_keys = ON"
                )  # spans, tags and figures go with their trace
                db.execute(_REMOVE_TRACES, (MARK,))
            left = (path, path.with_name(f"{path.name}-wal"))
            has_traces = any(
                each.exists() and self._bytes.search(each.read_bytes()) for each in left
            )
            if not self._dry_run and (changed or has_traces or path.name == _LEDGER):
                db.execute("VACUUM")
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return changed

    def _write(self, path: Path, text: str, count: int, rows: int = 0) -> int:
        return self._replace(
            path, lambda partial: partial.write_text(text, "utf-8", "surrogateescape"), count, rows
        )

    def _replace(self, path: Path, write: Callable[[Path], object], count: int, rows: int) -> int:
        if count:
            self._changed[path] = rows
        if count and not self._dry_run:
            with written_whole(path) as partial:
                write(partial)
                partial.chmod(stat.S_IMODE(path.stat().st_mode))
        return count

    # What depends on it

    def _put_right(self) -> None:
        """The digests and counts of what was changed, where they are written down, and the pages of
        reports."""
        for folder in self._version_folders():
            with self._noting(folder):
                version = Version.read(folder)
                lost = {
                    name: self._changed.get(each.path, 0)
                    for name, each in version.artifacts.items()
                }
                left = {
                    n: Artifact.of(each.path, (each.rows or 0) - lost[n])
                    for n, each in version.artifacts.items()
                }
                describe_again(version, left, lost["rows"])
                self._changed |= {folder / name: 0 for name in (VERSION_FILE, CARD, CARD_DATA)}
        for path in self._files:
            with self._noting(path):
                if path.name in (MANIFEST, REPORT_FILE) or path.name.endswith(REFERENCE):
                    value = json.loads(path.read_bytes())
                    if (renewed := self._renewed(value)) != value:
                        write_json(path, renewed)
                if path.name == REPORT_FILE and path in self._changed:
                    render_html(Report.read(path), path.with_suffix(".html"))

    def _version_folders(self) -> set[Path]:
        """Those that lost rows; one that lost no more than a pin has none of them in its files."""
        return {
            path.parent
            for path in self._changed
            if path.name != PINS and (path.parent / INDEX).exists()
        }

    def _renewed(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._renewed(each) for each in value]
        if not isinstance(value, dict):
            return value
        path = Path(str(value.get("path")))
        lost = (
            [rows for each, rows in self._changed.items() if each.is_relative_to(path)]
            if "sha256" in value
            else []
        )
        if not (lost and path.exists()):
            return {key: self._renewed(each) for key, each in value.items()}
        return value | {
            "sha256": sha256_of(path),
            "rows": value.get("rows") and value["rows"] - sum(lost),
        }

    def _store(self, path: Path) -> str:
        root = max(
            (each for each in self._roots if path.is_relative_to(each)),
            key=lambda each: len(each.parts),
        )
        name = self._roots[root]
        return f"{name}/{path.relative_to(root).parts[0]}" if name == "state" else name

    # What this can't reach

    def look_outside(self, server: PrefectServer | None) -> None:
        """Name other places that have, or may have, something of these rows."""
        from qinglan.registry import registry_of  # it needs MLflow, seconds

        profile, state = self._profile, self._profile.paths.state
        chats = [
            profile.teacher,
            profile.answerer,
            profile.judge,
            *profile.compare.teachers.values(),
        ]
        urls = {*(each.base_url for each in chats if each), profile.rag.url} - {EMBEDDED}
        lines = [
            f"where questions come from: {'data.sql' if profile.data.sql else profile.data.workbook}"
        ]
        lines += [f"what a service keeps of what it is asked: {url}" for url in sorted(urls)]
        lines += [f"a reviewer's workbook: {name}" for name in sorted(self._sheets)]
        lines.append(
            "files of `review export`, `review reasons`, `dataset judge-pairs`, wherever they are"
        )
        trained = {folder.name for folder in self._version_folders()}
        with suppress(QinglanError):
            models = registry_of(profile).versions() if trained else []
            lines += [
                f"weights: {each.name}/{each.version}"
                for each in models
                if each.dataset_version in trained
            ]
        runs = {path.parents[1] for path in self._changed if (path.parents[1] / "sft").is_dir()}
        lines += [
            f"weights: {folder / 'sft'}, and what was made of them" for folder in sorted(runs)
        ]
        lines += (
            [f"MLflow: {profile.tracking_uri}"] if profile.tracking_uri.startswith("http") else []
        )
        lines += [f"Prefect: {server.api_url}"] if server and not server.is_of_up else []
        with suppress(FileNotFoundError):
            backups = dict.fromkeys((state / BACKUPS_FILE).read_text(encoding="utf-8").splitlines())
            lines += [
                f"a backup, which loses them at its restore: {each}"
                for each in backups
                if Path(each).exists()
            ]
        caches = filter(Path.exists, map(Path.expanduser, map(Path, _CACHES)))
        self.done.outside += [
            *lines,
            *(f"an engine's cache, to be deleted: {path}" for path in caches),
        ]


def _row_id(text: str) -> str:
    """The row's id of an id that begins with it, or of a red team's case, which names its row
    behind the kind."""
    return _CASE.sub("", text)[:16]


def _files_of(roots: Iterable[Path]) -> Iterator[Path]:
    """All files but weights and what lies beside them, which is no text of ours."""
    found = {root for root in roots if root.is_file()}
    for root in roots:
        for at, _, names in os.walk(root):
            if not any(name.endswith(_WEIGHTS) for name in names):
                ours = (name for name in names if not name.endswith(_BESIDE_A_DATABASE))
                found |= {
                    Path(at, name) for name in ours if not name.startswith("~$")
                }  # an open workbook's lock
    return (path for path in found if not path.is_symlink())


def _is_long(text: str) -> bool:
    return len(normalise(text)) >= SHORTEST


def _is_jsonl(path: Path) -> bool:
    return path.name.removesuffix(".partial").endswith(".jsonl")


def _parsed(line: str) -> Any:
    """A line's record; None where it is none."""
    with suppress(ValueError):
        return json.loads(line)
    return None


def _context(cells: dict[str, str]) -> tuple[str, ...]:
    asked = tuple(normalise(cells.get(name, "")) for name in _CONTEXT)
    return (*asked, "" if all(asked) else normalise(cells.get(DIALOGUE, "")))  # as ingest reads it


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _strings(each, name)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)
