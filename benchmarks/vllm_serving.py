"""Our drafters and router inside vLLM: `python benchmarks/vllm_serving.py compare`.

`compare` and `http` run in the environment of vLLM, `ours` in the usual one. Each engine is made in
a process of its own, since vLLM does not give memory back, and gets all prompts at once, as token
ids. Greedy. Acceptance lengths are 1 + accepted / drafts, as vLLM counts them: drafts that were
right behind the end of an answer are counted too. `ours` writes the same counts of our own engine,
and those that are cut at the end; `--join` puts them into the table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import vllm_http
import vllm_table
from vllm_case import (
    FOLDERS,
    METHODS,
    NEEDED,
    ROOT,
    TARGET,
    Case,
    about,
    check_folders,
    console,
    draft_tokens,
    environment,
    read_prompts,
    require_vllm,
    save,
    speculative,
    target_folder,
)
from vllm_child import written

from whiflash_infer.artifacts import read_json
from whiflash_infer.drafters.load import ArmSettings
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.errors import UserError
from whiflash_infer.options import GenerationOptions
from whiflash_infer.types import Piece


def main() -> int:
    options = parser().parse_args()
    try:
        {"compare": compare, "ours": ours, "http": vllm_http.measure}[options.command](options)
    except UserError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    return 0


# --- what is measured -----------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> None:
    require_vllm()
    for method in options.methods:
        check_folders(Path(options.artifacts), NEEDED[method])
    prompts = read_prompts(options)
    cases = cases_of(options)
    joined = [found for path in options.join for found in read_json(path)["results"]["cases"]]
    results = []
    for case in cases:
        with console.status(str(case)):
            results.append({**about(case, prompts), **run_child(case, prompts, options)})
        console.print(f"{case}: {results[-1]['seconds']:.1f} s", style="dim", highlight=False)
    found = vllm_table.judged([*joined, *results])
    vllm_table.show(console, found)
    save(options, {"cases": found, "acceptance": vllm_table.acceptance(found)})


def cases_of(options: argparse.Namespace) -> list[Case]:
    caching = {"on": (True,), "off": (False,), "both": (False, True)}[options.prefix_caching]
    return [
        Case(
            method=method,
            concurrency=concurrency,
            prefix_caching=prefix_caching,
            dtype=options.dtype,
            max_tokens=options.max_tokens,
            draft_tokens=draft_tokens(method, options),
            chunked_tokens=options.chunked_tokens,
            block_size=options.block_size,
            abort=options.abort,
        )
        for prefix_caching in caching
        for concurrency in options.concurrency
        for method in options.methods
    ]


def run_child(
    case: Case, prompts: Mapping[str, list[int]], options: argparse.Namespace
) -> dict[str, Any]:
    """Raises: UserError with the end of what vLLM said, when it fails."""
    config, additional = speculative(case, Path(options.artifacts))
    told = {
        **asdict(case),
        "target": target_folder(options),
        "max_model_len": options.max_model_len,
        "speculative": config,
        "additional": additional,
        "prompts": dict(prompts),
    }
    with tempfile.TemporaryDirectory(prefix="whiflash-vllm-") as folder:
        asked, answered, log = (Path(folder) / name for name in ("case", "answers", "log"))
        asked.write_text(json.dumps(told))
        words = [sys.executable, Path(__file__).with_name("vllm_child.py"), asked, answered]
        with log.open("w") as file:
            status = subprocess.run(
                words, stdout=file, stderr=file, env=environment(options), check=False
            ).returncode
        if options.log is not None:
            with options.log.open("a") as file:
                file.write(f"== {case}\n{log.read_text()}")
        if status:
            end = "\n".join(log.read_text().splitlines()[-15:])
            raise UserError(f"vLLM failed ({case}), and said at the end:\n{end}")
        return json.loads(answered.read_text())


# --- our own engine -------------------------------------------------------------------------------


def ours(options: argparse.Namespace) -> None:
    """One text at a time; what is accepted does not depend on how many are decoded together."""
    torch.set_num_threads(options.threads)
    prompts = read_prompts(options)
    found = []
    for method in options.methods:
        check_folders(Path(options.artifacts), NEEDED[method])
        case = Case(
            method=method,
            concurrency=1,
            prefix_caching=False,
            dtype=options.dtype,
            max_tokens=options.max_tokens,
            draft_tokens=draft_tokens(method, options),
            engine="whiflash",
        )
        with console.status(str(case)):
            found.append({**about(case, prompts), **answer_all(case, prompts, options)})
    vllm_table.show(console, vllm_table.judged(found))
    save(options, {"cases": found})


def answer_all(
    case: Case, prompts: Mapping[str, list[int]], options: argparse.Namespace
) -> dict[str, Any]:
    """Counts as vLLM's: of rounds that began before the end, whole. `cut`: as our engine counts."""
    (arm,) = NEEDED[case.method]
    folder = Path(options.artifacts) / FOLDERS[arm]
    chain, block = (folder, None) if arm == "ar" else (None, folder)
    decoder = RoutedDecoder.from_pretrained(
        target_folder(options),
        ar=chain,
        diffusion=block,
        policy=case.method,
        dtype=case.dtype,
        arms=ArmSettings(
            draft_length=case.draft_tokens if chain else None,
            ar_tree=None,
            diffusion_tree=None,
        ),
    )
    counts = {"rounds": 0, "drafts": 0, "drafted": 0, "accepted": 0, "accepted_cut": 0}
    ids = {}
    for name, prompt in prompts.items():
        answered, counted = answer(decoder, prompt, case)
        ids[name] = written(answered)
        counts = {key: counts[key] + counted[key] for key in counts}
    return {"ids": ids, "tokens": sum(len(text.split()) for text in ids.values()), **counts}


def answer(
    decoder: RoutedDecoder, prompt: list[int], case: Case
) -> tuple[list[int], dict[str, int]]:
    """The end is found here, so that no round is cut: neither by a stop token nor by the limit."""
    room = case.max_tokens + case.draft_tokens + 1
    wanted = GenerationOptions(max_new_tokens=room, stop_ids=frozenset())
    ids: list[int] = []
    counts = {"rounds": 0, "drafts": 0, "drafted": 0, "accepted": 0, "accepted_cut": 0}
    for piece in decoder.stream(prompt, wanted):
        before = len(ids)
        ids = ended([*ids, *piece.ids], decoder.target.stop_ids, case.max_tokens)
        if piece.round is not None:
            counts = counted(counts, piece, len(ids) - before)
        if len(ids) < before + len(piece.ids) or ended_exactly(ids, decoder, case):
            break
    return ids, counts


def ended_exactly(ids: Sequence[int], decoder: RoutedDecoder, case: Case) -> bool:
    return len(ids) >= case.max_tokens or ids[-1] in decoder.target.stop_ids


def ended(ids: list[int], stop_ids: frozenset[int], limit: int) -> list[int]:
    """Up to the first stop token, which is kept, or the limit."""
    stop = next((i + 1 for i, token in enumerate(ids) if token in stop_ids), len(ids))
    return ids[: min(stop, limit)]


def counted(counts: Mapping[str, int], piece: Piece, kept: int) -> dict[str, int]:
    done = piece.round
    assert done is not None
    return {
        "rounds": counts["rounds"] + 1,
        "drafts": counts["drafts"] + (done.num_draft > 0),
        "drafted": counts["drafted"] + done.num_draft,
        "accepted": counts["accepted"] + done.accepted,
        "accepted_cut": counts["accepted_cut"] + min(done.accepted, kept),
    }


# --- the command line -----------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = whole.add_subparsers(dest="command", required=True)
    engine = commands.add_parser("compare", help="methods in vLLM; in its environment")
    add_common(engine, limit=16, max_tokens=64)
    add_engine(engine)
    own = commands.add_parser(
        "ours", help="the same counts of our engine; in the usual environment"
    )
    add_common(own, limit=16, max_tokens=64)
    own.add_argument("--methods", nargs="+", choices=METHODS[4:], default=METHODS[4:])
    own.add_argument("--draft-tokens", type=int, default=0, help="a round (default: as trained)")
    http = commands.add_parser("http", help="a server under short requests; in vLLM's environment")
    add_common(http, limit=64, max_tokens=16)
    vllm_http.add_options(http)
    return whole


def add_common(command: argparse.ArgumentParser, *, limit: int, max_tokens: int) -> None:
    add = command.add_argument
    add("--target", default=TARGET, help="folder of the target (default: SmolLM2-135M)")
    add("--artifacts", default=str(ROOT / "artifacts" / "smollm2_135m"), metavar="FOLDER")
    default = ROOT / "data_prep" / "prompts" / "evaluation.jsonl"
    add("--prompts", default=str(default), metavar="JSONL", help="lines with `messages`")
    add("--limit", type=int, default=limit, help="prompts, evenly from the whole file")
    add("--preamble", type=int, default=0, metavar="WORDS", help="that all prompts begin with")
    add("--max-tokens", type=int, default=max_tokens, help="of an answer")
    add("--dtype", default="float32")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--output", type=Path, metavar="JSON", help="file of the results (default: none)")


def add_engine(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS[:4]))
    add("--concurrency", nargs="+", type=int, default=[1], metavar="N", help="texts at a time")
    add("--prefix-caching", choices=("on", "off", "both"), default="on")
    add("--chunked-tokens", type=int, default=0, metavar="N", help="read in a step, at most")
    add("--block-size", type=int, default=0, help="of vLLM's cache (default: its own, 128)")
    add("--max-model-len", type=int, default=1024)
    add("--draft-tokens", type=int, default=0, help="a round (default: as trained)")
    add("--abort", action="store_true", help="give up one request when half of it is there")
    add("--join", nargs="+", type=Path, default=[], metavar="JSON", help="cases of earlier runs")
    add("--log", type=Path, help="file that all that vLLM says is added to")


if __name__ == "__main__":
    sys.exit(main())
