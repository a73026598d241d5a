from __future__ import annotations

import gzip
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from tests.data.common import source
from whiflash_infer.errors import UserError
from whiflash_train.data.rows import AnyRow, Conversation, PlainText, TokenRow
from whiflash_train.data.sources import DataSource, read_mixed
from whiflash_train.data.tally import Tally


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_prompts(path: Path, name: str, number: int) -> Path:
    return write_rows(path, *({"prompt": f"{name}{n}"} for n in range(number)))


def read(chosen: DataSource, tally: Tally | None = None) -> list[AnyRow]:
    return list(chosen.read(chosen.split, tally or Tally(), roles={}))


def texts(rows: list[AnyRow]) -> list[list[str]]:
    conversations = [row for row in rows if isinstance(row, Conversation)]
    assert len(conversations) == len(rows)
    return [[m["content"] for m in row.messages] for row in conversations]


def mixed(
    sources: dict[str, DataSource], *, validation: bool = False, tally: Tally | None = None
) -> Iterator[tuple[str, AnyRow]]:
    return read_mixed(sources, tally or Tally(), validation=validation, roles={})


@pytest.mark.parametrize(
    ("columns", "row", "expected"),
    [
        ({"prompt": "question"}, {"question": "Hi"}, ["Hi"]),
        ({"prompt": "question"}, {"question": "Hi", "answer": "Hello"}, ["Hi", "Hello"]),
        ({"prompt": "q", "answer": "a"}, {"q": "Hi", "a": "Hello"}, ["Hi", "Hello"]),
        # Keys that are not named must not win over those that are.
        ({"prompt": "q"}, {"q": "Hi", "messages": [{"role": "user", "content": "no"}]}, ["Hi"]),
        ({"prompt": "prompt"}, {"prompt": "Hi", "turns": ["no", "no"]}, ["Hi"]),
        (
            {"prompt": "q", "completion": "s"},
            {"q": "Hi", "s": "Hello", "answer": 4},
            ["Hi", "Hello"],
        ),
        ({"turns": "prompt"}, {"prompt": ["Hi", "And?"]}, ["Hi"]),
        ({"messages": "dialogue"}, {"dialogue": [{"from": "human", "value": "Hi"}]}, ["Hi"]),
        ({"prompt": "{a}, {b-2} {the c}!"}, {"a": "Hi", "b-2": 2, "the c": "{a}"}, ["Hi, 2 {a}!"]),
        ({"prompt": 'Answer in {"a": 1}: {q}'}, {"q": "Hi"}, ['Answer in {"a": 1}: Hi']),
        (
            {"prompt": "Say {q}", "system": "s"},
            {"q": "Hi", "s": "Be brief."},
            ["Be brief.", "Say Hi"],
        ),
    ],
)
def test_columns_are_renamed_and_put_into_texts(
    columns: dict[str, str], row: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", row)
    assert texts(read(source(path, columns=columns))) == [expected]


def test_columns_that_make_text_make_running_text(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "Q", "response": "A", "messages": []})
    (row,) = read(source(path, columns={"text": "<s>{prompt}</s>{response}"}))
    assert isinstance(row, PlainText)
    assert row.text == "<s>Q</s>A"


@pytest.mark.parametrize("columns", [{"prompt": "question"}, {"prompt": "Say: {question}"}])
def test_a_row_without_a_named_column_is_dropped_and_the_column_is_told(
    columns: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, {"question": "Hi"}, {"prompt": "Hi"}, {"question": None}, [1])
    tally = Tally()
    assert len(read(source(path, columns=columns), tally)) == 1
    assert tally.dropped == {"missing_column": 2, "not_an_object": 1}
    assert tally.examples["missing_column"] == [
        "rows.jsonl:2 ('question' is not in ['prompt'])",
        "rows.jsonl:3 ('question' is not in ['question'])",
    ]


def test_a_category_is_given_to_rows_that_bring_none(tmp_path: Path) -> None:
    rows = [{"category": "code"}, {}, {"category": None}, {"category": ""}, {"kind": "maths"}]
    path = write_rows(tmp_path / "rows.jsonl", *({"prompt": "Hi", **row} for row in rows))
    categories = [row.category for row in read(source(path, category="chat"))]
    assert categories == ["code", "chat", "chat", "all", "chat"]
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "Hi", "kind": "maths"})
    chosen = source(path, category="chat", columns={"category": "kind", "id": "{kind}-1"})
    assert [(row.category, row.id) for row in read(chosen)] == [("maths", "maths-1")]


def test_roles_of_the_configuration_reach_the_rows(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "laguna_s", "content": "Hello"}]
    path = write_rows(tmp_path / "rows.jsonl", {"messages": said}, {"conversations": said})
    tally = Tally()
    assert read(source(path), tally) == []
    assert tally.details() == [
        "unknown_role: 2 rows, rows.jsonl:1 ('laguna_s'; name it in data.roles); "
        "rows.jsonl:2 ('laguna_s'; name it in data.roles)"
    ]
    rows = source(path).read("train", Tally(), roles={"laguna_s": "assistant"})
    assert texts(list(rows)) == [["Hi", "Hello"]] * 2


def test_a_thousand_texts_are_a_thousand_rows(tmp_path: Path) -> None:
    # U11: almost all rows of text were lost.
    path = write_rows(tmp_path / "rows.jsonl", *({"text": f"text {n}"} for n in range(1000)))
    tally = Tally()
    rows = read(source(path), tally)
    assert [row.text for row in rows if isinstance(row, PlainText)] == [
        f"text {n}" for n in range(1000)
    ]
    assert str(tally) == "read 1000 = kept 1000 + dropped 0 + failed 0"


def test_all_shapes_may_stand_in_one_file(tmp_path: Path) -> None:
    # U21: a reader of one key failed on rows with the other.
    said = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    asked = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [{"conversations": said}, {"messages": asked}, {"prompt": "Hi", "answer": "Hello"}]
    rows += [{"text": "Hi"}, {"input_ids": [1], "loss_mask": [1]}]
    found = read(source(write_rows(tmp_path / "rows.jsonl", *rows)))
    assert texts(found[:3]) == [["Hi", "Hello"]] * 3
    assert [type(row) for row in found[3:]] == [PlainText, TokenRow]


def test_a_limit_counts_good_rows_and_reads_no_further(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "rows.jsonl", "q", 3)
    path.write_text("\n" + path.read_text() + "no JSON\n")
    tally = Tally(strict=True)
    assert texts(read(source(path, limit=3), tally)) == [["q0"], ["q1"], ["q2"]]
    assert (tally.read, tally.kept) == (4, 3)


def test_a_limit_pulls_no_more_rows_from_a_stream_than_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled: list[int] = []

    def endless() -> Iterator[dict[str, Any]]:
        for n in range(10**9):
            pulled.append(n)
            yield {"prompt": None if n % 2 else f"q{n}"}

    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: endless())
    tally = Tally()
    rows = read(source("owner/set", streaming=True, limit=3), tally)
    assert texts(rows) == [["q0"], ["q2"], ["q4"]]
    assert pulled == [0, 1, 2, 3, 4]
    assert str(tally) == "read 5 = kept 3 + dropped 2 (unknown_shape 2) + failed 0"
    assert rows[1].place == "owner/set:train:3"


@pytest.mark.parametrize("validation", [False, True])
def test_what_is_asked_of_the_hub_is_what_is_configured(
    validation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def load_dataset(*args: Any, **kwargs: Any) -> list[dict[str, str]]:
        asked.append((args, kwargs))
        return [{"prompt": "Hi"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    fields = {"name": "main", "revision": "abc", "streaming": True, "validation_split": "test"}
    rows = list(mixed({"a": source("owner/set", **fields)}, validation=validation))
    assert [name for name, _ in rows] == ["a"]
    split = "test" if validation else "train"
    assert asked == [
        (("owner/set", "main"), {"split": split, "revision": "abc", "streaming": True})
    ]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json"])
def test_a_source_without_a_single_row_says_so(name: str, tmp_path: Path) -> None:
    # U22: empty files crashed the reader of others.
    content = {"rows.jsonl": b"", "rows.jsonl.gz": gzip.compress(b""), "rows.json": b"[]"}[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name} is empty: it holds no row of split 'train'"):
        read(source(tmp_path / name))


def test_an_empty_file_among_others_is_no_matter(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    write_prompts(tmp_path / "b.jsonl", "q", 1)
    assert texts(read(source(tmp_path))) == [["q0"]]


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": 0.0},
        {"weight": -1.0},
        {"weight": float("nan")},
        {"weight": float("inf")},
        {"limit": 0},
        {"limit": -1},
        {"validation_split": "train"},
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(changes))} is"):
        source("owner/set", **changes)


@pytest.mark.parametrize(
    ("weights", "order"),
    [
        ({"a": 1.0, "b": 1.0}, "abababab"),
        ({"a": 3.0, "b": 1.0}, "abaaabaaabaaabaa"),
        ({"a": 1.0, "b": 2.0}, "abbabbabb"),
        ({"a": 0.5, "b": 0.5, "c": 1.0}, "abccabccabcc"),
    ],
)
def test_sources_are_interleaved_by_weight(
    weights: dict[str, float], order: str, tmp_path: Path
) -> None:
    sources = {
        name: source(write_prompts(tmp_path / f"{name}.jsonl", name, 50), weight=weight)
        for name, weight in weights.items()
    }
    assert "".join(name for name, _ in islice(mixed(sources), len(order))) == order


@pytest.mark.parametrize(
    "weights", [(3.0, 1.0), (1.0, 1.0), (1.0, 7.0), (0.3, 0.7), (5.0, 3.0, 2.0)]
)
def test_every_prefix_of_a_mixture_holds_the_shares(
    weights: tuple[float, ...], tmp_path: Path
) -> None:
    sources = {
        str(i): source(write_prompts(tmp_path / f"{i}.jsonl", "q", 200), weight=weight)
        for i, weight in enumerate(weights)
    }
    seen: Counter[str] = Counter()
    for taken, (name, _) in enumerate(islice(mixed(sources), 200), start=1):
        seen[name] += 1
        for index, weight in enumerate(weights):
            assert abs(seen[str(index)] - taken * weight / sum(weights)) <= len(weights) - 1


def test_a_source_that_ends_drops_out_and_nothing_is_lost(tmp_path: Path) -> None:
    numbers = {"a": 7, "b": 2, "c": 30}
    sources = {
        name: source(write_prompts(tmp_path / f"{name}.jsonl", name, number), weight=2.0)
        for name, number in numbers.items()
    }
    tally = Tally()
    rows = list(mixed(sources, tally=tally))
    assert "".join(name for name, _ in rows).startswith("abcabcacacacacaccc")
    for name, number in numbers.items():
        assert texts([row for n, row in rows if n == name]) == [
            [f"{name}{i}"] for i in range(number)
        ]
    assert (tally.read, tally.kept) == (39, 39)


def test_two_sources_with_a_cap_are_both_present(tmp_path: Path) -> None:
    # U95: the first source filled the cap, and the second was never seen.
    sources = {
        name: source(write_prompts(tmp_path / f"{name}.jsonl", name, 500)) for name in ("a", "b")
    }
    assert Counter(name for name, _ in islice(mixed(sources), 100)) == {"a": 50, "b": 50}
    capped = {name: source(s.path, limit=10) for name, s in sources.items()}
    assert Counter(name for name, _ in mixed(capped)) == {"a": 10, "b": 10}


def test_bad_rows_of_a_source_do_not_count_towards_its_share(tmp_path: Path) -> None:
    bad = write_rows(
        tmp_path / "a.jsonl", *([1] * 9 + [{"prompt": "a0"}] + [1] * 9 + [{"prompt": "a1"}])
    )
    sources = {"a": source(bad), "b": source(write_prompts(tmp_path / "b.jsonl", "b", 3))}
    tally = Tally()
    assert [name for name, _ in mixed(sources, tally=tally)] == ["a", "b", "a", "b", "b"]
    assert str(tally) == "read 23 = kept 5 + dropped 18 (not_an_object 18) + failed 0"


def test_validation_reads_the_sources_that_have_a_split_for_it(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_prompts(tmp_path / f"{split}.jsonl", split, 2)
    own = write_prompts(tmp_path / "own.jsonl", "own", 2)
    saved: Any = {
        split: Dataset.from_list([{"prompt": f"saved {split}"}]) for split in ("train", "dev")
    }
    DatasetDict(saved).save_to_disk(str(tmp_path / "saved"))
    sources = {
        "files": source(tmp_path / "{split}.jsonl", validation_split="test"),
        "own": source(own),
        "saved": source(tmp_path / "saved", validation_split="dev"),
    }
    held = [(name, *texts([row])[0]) for name, row in mixed(sources, validation=True)]
    assert held == [("files", "test0"), ("saved", "saved dev"), ("files", "test1")]
    trained = [text for _, row in mixed(sources) for text in texts([row])[0]]
    assert trained == ["train0", "own0", "saved train", "train1", "own1"]


@pytest.mark.parametrize("name", ["rows.jsonl", "folder", "*.jsonl", "saved"])
def test_a_validation_split_of_a_path_without_splits_is_refused(name: str, tmp_path: Path) -> None:
    # The same rows would be trained and validated on.
    write_prompts(tmp_path / "rows.jsonl", "q", 2)
    (tmp_path / "folder").mkdir()
    write_prompts(tmp_path / "folder" / "rows.jsonl", "q", 2)
    Dataset.from_list([{"prompt": "q"}]).save_to_disk(str(tmp_path / "saved"))
    sources = {"a": source(tmp_path / name, validation_split="test")}
    assert len(list(mixed(sources))) > 0
    with pytest.raises(UserError, match=r"the same rows for split 'test' as for 'train': put"):
        list(mixed(sources, validation=True))


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """An address, and the folder whose files are served there."""

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    folder = tmp_path / "served"
    folder.mkdir()
    monkeypatch.setattr("datasets.config.DOWNLOADED_DATASETS_PATH", str(tmp_path / "cache"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_file_of_the_web_is_fetched_and_read_by_its_name(served: tuple[str, Path]) -> None:
    address, folder = served
    for split in ("train", "test"):
        line = json.dumps({"prompt": f"{split} 🙂"}) + "\n"
        (folder / f"{split} rows.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    chosen = source(f"{address}/{{split}}%20rows.jsonl.gz?download=true", validation_split="test")
    (row,) = read(chosen)
    assert texts([row]) == [["train 🙂"]]
    assert row.place == "train rows.jsonl.gz:1"
    assert texts(list(chosen.read("test", Tally(), roles={}))) == [["test 🙂"]]
    with pytest.raises(UserError, match=rf"^cannot fetch {address}/absent\.jsonl: "):
        read(source(f"{address}/absent.jsonl"))


def test_a_file_of_the_web_has_one_split_only(served: tuple[str, Path]) -> None:
    address, folder = served
    write_prompts(folder / "rows.jsonl", "q", 2)
    sources = {"a": source(f"{address}/rows.jsonl", validation_split="test")}
    assert texts([row for _, row in mixed(sources)]) == [["q0"], ["q1"]]
    with pytest.raises(UserError, match="the same rows for split 'test'"):
        list(mixed(sources, validation=True))


def test_a_file_inside_a_set_of_the_hub_is_fetched_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[Any] = []

    def fetch(*args: Any, **kwargs: Any) -> str:
        fetched.append((args, kwargs))
        return str(write_prompts(tmp_path / "blob.jsonl", "q", 1))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    rows = read(source("owner/set", hub_file="data/{split}.jsonl", revision="abc"))
    assert texts(rows) == [["q0"]]
    expected = {"repo_type": "dataset", "revision": "abc"}
    assert fetched == [(("owner/set", "data/train.jsonl"), expected)]


def test_a_file_that_the_hub_does_not_give_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"^cannot fetch rows\.json of the data set owner/set: "):
        read(source("owner/set", hub_file="rows.json"))
