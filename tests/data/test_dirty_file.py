"""One file with everything that goes wrong in files, from its bytes to its masks."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.common import source
from whiflash_infer.chat import Chat
from whiflash_infer.errors import UserError
from whiflash_infer.sources import byte_tokenizer
from whiflash_train.data.masks import Masker, MaskRules
from whiflash_train.data.rows import AnyRow, Conversation, PlainText, TokenRow
from whiflash_train.data.tally import BadRow, Tally


def encoded(row: Any) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode()


def asked(question: Any, answer: Any = "Yes.") -> bytes:
    roles_and_texts = [("user", question), ("assistant", answer)]
    return encoded({"messages": [{"role": r, "content": text} for r, text in roles_and_texts]})


def called(arguments: Any) -> bytes:
    call = {"function": {"name": "look", "arguments": arguments}}
    user = {"role": "user", "content": "Look!"}
    return encoded({"messages": [user, {"role": "assistant", "tool_calls": [call]}]})


def spoken(*roles: str) -> bytes:
    return encoded({"messages": [{"role": role, "content": "x"} for role in roles]})


def raw(content: str) -> bytes:
    """A prompt whose content is this very JSON."""
    return b'{"prompt": ' + content.encode() + b"}"


MARKUP = "# Title\n\n```py\nx = {'a': [1]}\n```\n<b>&amp;</b>\t\\n"
# Lines as they stand in the file, with the text of every message that must come of them.
GOOD: list[tuple[bytes, list[str]]] = [
    (b"\xef\xbb\xbf" + asked("byte order mark"), ["byte order mark", "Yes."]),
    (asked("carriage return") + b"\r", ["carriage return", "Yes."]),
    (b"  " + asked("spaces around") + b" \t ", ["spaces around", "Yes."]),
    (b"\xef\xbb\xbf" + asked("a file that was appended"), ["a file that was appended", "Yes."]),
    (asked("🙂 👩‍👩‍👧 e\u0301", "你好 עברית"), ["🙂 👩‍👩‍👧 e\u0301", "你好 עברית"]),
    (asked("a\u2028b\u2029c\x85d", "x\u2028"), ["a\u2028b\u2029c\x85d", "x\u2028"]),
    (raw(r'"\u0000 \ud83d\ude42 \u2028 \r\n \/ \\n"'), ["\0 🙂 \u2028 \r\n / \\n"]),
    (raw(r'[{"role": "user", "content": [{"type": "text", "text": "in parts"}]}]'), ["in parts"]),
    (asked(MARKUP), [MARKUP, "Yes."]),
    (called('{"city": null}'), ["Look!", ""]),
    (called({}), ["Look!", ""]),
    (asked("z" * 5_000_000), ["z" * 5_000_000, "Yes."]),
    (encoded({"prompt": "no answer yet"}), ["no answer yet"]),
    (encoded({"conversations": [{"from": "human", "value": "ShareGPT"}]}), ["ShareGPT"]),
    (encoded({"text": "running\u2028text"}), ["running\u2028text"]),
    (encoded({"input_ids": [9, 8], "loss_mask": [0, 1]}), ["9 8"]),
    (encoded({"prompt": "extra keys", "score": -1.5e300, "x": [[{}]]}), ["extra keys"]),
]

BAD: list[tuple[bytes, str]] = [
    (b"", "blank_line"),
    (b" \t\r", "blank_line"),
    (b"\xef\xbb\xbf", "blank_line"),
    (b'{"prompt": "cut off he', "invalid_json"),
    (b'{"prompt": "trailing comma",}', "invalid_json"),
    (b"{'prompt': 'as Python prints it'}", "invalid_json"),
    (b'{"prompt": "two rows"} {"prompt": "on a line"}', "invalid_json"),
    (b'{"prompt": "a tab \t as it is"}', "invalid_json"),
    (b'{"prompt": "once", "prompt": "twice"}', "invalid_json"),
    (b'{"prompt": "x", "score": NaN}', "invalid_json"),
    (b'{"prompt": "x", "score": -Infinity}', "invalid_json"),
    (b'{"prompt": "x", "score": ' + b"9" * 5000 + b"}", "invalid_json"),
    (b"\0" * 64, "invalid_json"),
    (b"version https://git-lfs.github.com/spec/v1", "invalid_json"),
    (b'{"x": ' * 100_000, "invalid_json"),
    (b"[" * 100_000 + b"]" * 100_000, "invalid_json"),
    ('{"prompt": "UTF-16"}'.encode("utf-16-le"), "invalid_json"),
    ('{"prompt": "UTF-16"}'.encode("utf-16"), "invalid_utf8"),
    ('{"prompt": "Grüße"}'.encode("latin-1"), "invalid_utf8"),
    (b'{"prompt": "\xed\xa0\xbd"}', "invalid_utf8"),
    (raw(r'"half a pair \ud83d"'), "invalid_unicode"),
    (called(r'{"x": "\ud83d"}'), "invalid_unicode"),
    (b"null", "not_an_object"),
    (b"[]", "not_an_object"),
    (b'"text"', "not_an_object"),
    (b"{}", "unknown_shape"),
    (b'{"prompt": null}', "unknown_shape"),
    (encoded({"instruction": "an unknown key"}), "unknown_shape"),
    (encoded({"messages": []}), "no_messages"),
    (encoded({"messages": {"role": "user"}}), "no_messages"),
    (encoded({"messages": 3}), "no_messages"),
    (encoded({"messages": "one text"}), "bad_messages_json"),
    (encoded({"messages": ["Hi", "Hello"]}), "message_not_an_object"),
    (encoded({"messages": [{"content": "no role"}]}), "unknown_role"),
    (spoken("wizard"), "unknown_role"),
    (spoken("user", "user"), "roles_out_of_order"),
    (spoken("user", "assistant", "assistant"), "roles_out_of_order"),
    (spoken("user", "tool"), "roles_out_of_order"),
    (spoken("assistant", "user"), "opens_with_assistant"),
    (spoken("system"), "no_user_turn"),
    (asked(None), "null_content"),
    (asked("?", None), "null_content"),
    (asked(""), "empty_content"),
    (asked("?", " \n"), "empty_content"),
    (raw('""'), "empty_content"),
    (asked(3), "content_not_text"),
    (raw("1e999"), "content_not_text"),
    (asked([{"type": "image_url", "image_url": {"url": "x.png"}}]), "content_not_text"),
    (encoded({"prompt": "x", "tools": "[{bad"}), "bad_tools_json"),
    (encoded({"prompt": "x", "tools": [{}]}), "bad_tools_json"),
    (called('{"x": '), "bad_tool_call_json"),
    (called([1]), "bad_tool_call_json"),
    (called('{"x": ' * 500 + "1" + "}" * 500), "bad_tool_call_json"),
    (encoded({"input_ids": [1, 2]}), "no_loss_mask"),
    (encoded({"input_ids": [1, 2], "loss_mask": [1]}), "mask_length_differs"),
    (encoded({"input_ids": ["1"], "loss_mask": [1]}), "bad_input_ids"),
    (encoded({"input_ids": [1], "loss_mask": [0.5]}), "bad_loss_mask"),
    (encoded({"turns": []}), "no_messages"),
    (encoded({"prompt": "x", "later_turns": "y"}), "bad_later_turns"),
    (encoded({"prompt": "long " * 3_500_000}), "line_too_long"),
    (b'{"messages": [{"role": "user", "conte', "invalid_json"),
]


@pytest.fixture(scope="module")
def dirty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good and bad lines in turn, then the other bad ones; the last is cut in half."""
    path = tmp_path_factory.mktemp("dirty") / "dirty.jsonl"
    path.write_bytes(b"\n".join(line for line, _ in in_file_order()))
    return path


def in_file_order() -> list[tuple[bytes, list[str] | str]]:
    pairs = zip(GOOD, BAD, strict=False)
    return [*(line for pair in pairs for line in pair), *BAD[len(GOOD) :]]


def read(path: Path, tally: Tally) -> list[AnyRow]:
    return list(source(path).read("train", tally, roles={}))


def texts(row: AnyRow) -> list[str]:
    match row:
        case Conversation():
            return [m["content"] for m in row.messages]
        case PlainText():
            return [row.text]
        case TokenRow():
            return [" ".join(map(str, row.input_ids))]


def test_good_rows_between_bad_ones_come_out_as_they_were_written(dirty: Path) -> None:
    # U22: blank lines, byte order marks and half lines crashed the reader of others.
    rows = read(dirty, Tally())
    assert [texts(row) for row in rows] == [content for _, content in GOOD]
    assert [row.place for row in rows] == [f"dirty.jsonl:{2 * i + 1}" for i in range(len(GOOD))]
    assert [row.id for row in rows] == [row.place for row in rows]


def test_every_bad_line_is_counted_under_its_reason_and_the_totals_add_up(dirty: Path) -> None:
    tally = Tally()
    read(dirty, tally)
    assert len(BAD) > 30
    assert tally.as_dict() == {
        "read": len(GOOD) + len(BAD),
        "kept": len(GOOD),
        "dropped": dict(sorted(Counter(reason for _, reason in BAD).items())),
        "failed": 0,
        "notes": {},
    }
    tally.require_kept(len(GOOD))
    assert str(tally).startswith(f"read {len(GOOD) + len(BAD)} = kept {len(GOOD)} + dropped")


def test_the_first_places_of_every_reason_are_told_by_line_number(dirty: Path) -> None:
    tally = Tally()
    read(dirty, tally)
    places: dict[str, list[str]] = {}
    for number, (_, outcome) in enumerate(in_file_order(), start=1):
        if isinstance(outcome, str):
            places.setdefault(outcome, []).append(f"dirty.jsonl:{number}")
    told = {why: [e.partition(" (")[0] for e in tally.examples[why]] for why in tally.dropped}
    assert told == {why: found[:3] for why, found in places.items()}
    assert "\n".join(tally.details()).encode().count(b"\n") == len(places) - 1
    assert max(map(len, tally.details())) < 700


@pytest.mark.parametrize(
    ("line", "reason"), [b for b in BAD if b[1] != "blank_line"], ids=lambda v: str(v)[:40]
)
def test_strict_stops_at_the_first_faulty_line_but_not_at_blank_ones(
    line: bytes, reason: str, tmp_path: Path
) -> None:
    # U23: one malformed line among good ones.
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([asked("good"), b"", b" \r", line, b"also bad"]))
    tally = Tally(strict=True)
    with pytest.raises(UserError, match=rf"^rows\.jsonl:4: {reason}"):
        read(path, tally)
    assert tally.as_dict()["dropped"] == {"blank_line": 2}


def test_the_same_lines_in_a_packed_file_have_the_same_fate(dirty: Path, tmp_path: Path) -> None:
    packed = tmp_path / "dirty.jsonl.gz"
    packed.write_bytes(gzip.compress(dirty.read_bytes(), compresslevel=1))
    plain, unpacked = Tally(), Tally()
    contents = [texts(row) for row in read(dirty, plain)]
    assert [texts(row) for row in read(packed, unpacked)] == contents
    assert unpacked.as_dict() == plain.as_dict()


def masker(**rules: Any) -> Masker:
    chosen = {"turns": "all", "reasoning": True, "over_long": "truncate", **rules}
    return Masker(Chat(byte_tokenizer(), frozenset({2})), MaskRules(**chosen))


def short(rows: list[AnyRow]) -> list[AnyRow]:
    """A tokenizer of bytes takes seconds over megabytes."""
    return [row for row in rows if len(texts(row)[0]) < 10_000]


@pytest.mark.parametrize("turns", ["all", "last"])
@pytest.mark.parametrize("text", ["chat", "plain"])
def test_whatever_was_kept_gets_a_mask_or_a_reason(dirty: Path, turns: str, text: str) -> None:
    tally = Tally()
    rows = read(dirty, tally)
    masked = len(rows) - len(short(rows))
    assert masked == 1
    mask = masker(turns=turns, text=text, max_length=64, min_supervised=2)
    for row, outcome in zip(short(rows), mask(short(rows)), strict=True):
        if isinstance(outcome, BadRow):
            tally.drop(row.place, outcome)
            continue
        masked += 1
        assert all(len(made.ids) == len(made.mask) <= 64 for made in outcome)
    tally.require_kept(masked)


def test_masks_cover_the_answers_that_were_written(dirty: Path) -> None:
    mask = masker(text="chat", max_length=10_000, min_supervised=1)
    rows = short(read(dirty, Tally()))
    answered = [r for r in rows if isinstance(r, Conversation) and r.answer_indices]
    assert len(answered) > 8
    for row, outcome in zip(answered, mask(answered), strict=True):
        if any("tool_calls" in message for message in row.messages):
            assert isinstance(outcome, BadRow)  # this template does not render them
            continue
        assert isinstance(outcome, list)
        (made,) = outcome
        supervised = [i for i, kept in zip(made.ids, made.mask, strict=True) if kept]
        assert mask.chat.tokenizer.decode(supervised) == texts(row)[-1] + "<|im_end|>"


@given(st.lists(st.binary(max_size=12) | st.sampled_from([b for b, _ in BAD if len(b) < 200])))
@settings(max_examples=60, deadline=None)
def test_any_bytes_at_all_are_rows_or_counted_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    content = b"\n".join([*lines, asked("the end")])
    path = tmp_path_factory.mktemp("bytes") / "rows.jsonl"
    path.write_bytes(content)
    tally = Tally()
    assert texts(read(path, tally)[-1]) == ["the end", "Yes."]
    assert tally.read == content.count(b"\n") + 1
