"""Every stage through its real entry point, on the tiny target: the README's path in seconds."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.docs.readme import followed
from tests.stages import ROOT, appears, attempt, common, manifest_of, run
from whiflash_infer.errors import UserError
from whiflash_train.entry import check_keys


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every stage of the README has run once."""
    return followed(tmp_path_factory)


def test_every_stage_leaves_a_complete_artefact(workplace: Path) -> None:
    for artefact in ("conversations", "ar_drafter", "diffusion_drafter", "rounds", "router"):
        found = manifest_of(workplace, artefact)
        assert found["target"]["name"] == "tiny"
        assert found["seed"] == 0
        assert "torch" in found["packages"]
    counts = manifest_of(workplace, "conversations")["counts"]
    assert counts["read"] == counts["kept"] + sum(counts["dropped"].values()) + counts["failed"]
    assert counts["splits"]["train"]["rows"] + counts["splits"]["router"]["rows"] == 32
    leftovers = [p for p in (workplace / "artifacts/tiny").iterdir() if p.name.startswith(".")]
    assert leftovers == []


def test_the_evaluation_has_a_row_for_every_policy_and_category(workplace: Path) -> None:
    folder = workplace / "artifacts/tiny/evaluation"
    metrics = json.loads((folder / "metrics.json").read_text())
    statics = [f"static_{arm}" for arm in ("ar", "ar_tree", "diffusion", "diffusion_tree")]
    policies = ["plain", *statics, "entropy", "hazard"]
    assert list(metrics["policies"]) == policies
    for report in metrics["policies"].values():
        assert sorted(report["by_category"]) == ["chat", "code", "json", "maths"]
        for parts in ("by_category", "by_prompt_length"):
            tokens = sum(cell["tokens"] for cell in report[parts].values())
            assert report["overall"]["tokens"] == tokens
        assert sum(report["overall"]["time_split"].values()) == pytest.approx(1.0)
    assert metrics["policies"]["plain"]["overall"]["speedup"] == 1.0
    rounds = pq.read_table(folder / "rounds.parquet").to_pylist()
    assert len(rounds) == sum(r["overall"]["rounds"] for r in metrics["policies"].values())
    assert "hazard" in (folder / "report.html").read_text()
    header = metrics["header"]
    assert {"device", "dtype", "threads", "temperature", "seed", "prompt_set"} <= set(header)
    assert {"whiflash", "torch", "transformers"} <= set(header["versions"])
    assert (header["bonus_token"], header["batch"]) == ("counted", 1)


def test_the_lossless_check_passes_in_float32(workplace: Path) -> None:
    output = run(workplace, "evaluate.py check=lossless dtype=float32")
    rows = [[cell.strip() for cell in line.split("│")[1:5]] for line in output.splitlines()]
    statics = [f"static_{arm}" for arm in ("ar", "ar_tree", "diffusion", "diffusion_tree")]
    policies = ["plain", *statics, "entropy", "hazard", "random"]
    expected = [[policy, together, "4/4", "0"] for policy in policies for together in ("1", "8")]
    assert [row for row in rows if row[-2:] == ["4/4", "0"]] == expected
    assert "would have said 0 of its" in output


def test_in_bfloat16_differences_are_told_with_their_gaps(workplace: Path) -> None:
    told = attempt(workplace, "evaluate.py check=lossless dtype=bfloat16")
    rows = [[cell.strip() for cell in line.split("│")[1:8]] for line in told.out.splitlines()]
    rows = [row for row in rows if len(row) == 7 and row[2].endswith("/4")]
    assert len(rows) == 16
    for row in rows:
        same, near = int(row[2].split("/")[0]), int(row[3])
        assert bool(row[6]) == (same < 4)
        assert near <= 4 - same
    unexplained = sum(4 - int(row[2].split("/")[0]) - int(row[3]) for row in rows)
    assert told.status == (2 if unexplained else 0)
    assert "tokens otherwise" in told.out


@pytest.mark.parametrize("options", ["", "decode.sync=eager"])
def test_trees_are_measured_where_they_are_asked_for(workplace: Path, options: str) -> None:
    trees = {"static_ar_tree": (4, 13), "static_diffusion_tree": (7, 11)}
    run(
        workplace,
        f"evaluate.py evaluate.policies=[plain,static_ar,{','.join(trees)}] dtype=float32 "
        "costs.allow_foreign=true paths.evaluation=trees arms.ar_tree.depth=4 "
        f"arms.ar_tree.num_nodes=13 arms.diffusion_tree=11 {options}",
    )
    metrics = json.loads((workplace / "trees/metrics.json").read_text())
    assert list(metrics["side_by_side"]) == ["ar"]
    rounds = pq.read_table(workplace / "trees/rounds.parquet").to_pylist()
    for policy, (deepest, num_nodes) in trees.items():
        overall = metrics["policies"][policy]["overall"]
        assert (overall["identical"], overall["fallbacks"]) == (1.0, {})
        assert sum(overall["time_split"].values()) == pytest.approx(1.0)
        mine = [r for r in rounds if r["policy"] == policy]
        assert max(r["num_draft"] for r in mine) == deepest
        assert max(r["num_nodes"] for r in mine) == num_nodes
    chain = [r for r in rounds if r["policy"] == "static_ar"]
    assert all(r["num_nodes"] == r["num_draft"] for r in chain)


def test_replayed_rounds_are_the_decoded_ones_under_every_policy(workplace: Path) -> None:
    output = run(
        workplace,
        "evaluate.py check=replay dtype=float32 costs=allow_foreign evaluate.replay_prompts=4",
    )
    rows = [line.split("│")[1:3] for line in output.splitlines() if line.startswith("│")]
    found = {policy.strip(): same.strip() for policy, same in rows if same.strip()}
    arms = ("ar", "ar_tree", "diffusion", "diffusion_tree")
    hindsight = {"hedge", "oracle_round", "oracle_path"}
    routed = {"hazard", "entropy", "delta", "request", "category", "bandit"}
    statics = {f"static_{arm}" for arm in arms}
    assert found.keys() == {"plain", "random"} | statics | routed | hindsight
    assert set(found.values()) == {"4/4"}


def test_the_router_remembers_how_it_was_judged(workplace: Path) -> None:
    manifest = manifest_of(workplace, "router")
    replayed = manifest["replay"]
    assert replayed["verdict"]
    assert replayed["price_trace"][-1][0] == replayed["lam"]
    for policy in ("plain", "static_ar_tree", "entropy", "delta", "hazard", "hedge", "oracle_path"):
        assert replayed["policies"][policy]["tokens_per_s"] > 0
    best = max(found["tokens_per_s"] for found in replayed["policies"].values())
    assert replayed["policies"]["oracle_path"]["tokens_per_s"] == best
    logged = list(csv.DictReader(next(metrics_of(workplace)).open()))
    names = {name for row in logged for name, value in row.items() if value}
    wanted = ("tokens_per_s", "tau", "lam", "switches_per_100_rounds", "regret", "share_of_oracle")
    assert {f"val/{name}" for name in (*wanted, "share_of_ceiling", "calibration_error")} <= names


def metrics_of(workplace: Path) -> Iterator[Path]:
    return (workplace / "artifacts/tiny/runs/router").rglob("metrics.csv")


def test_without_trees_the_lossless_check_has_no_rows_of_them(workplace: Path) -> None:
    off = "arms.ar_tree=null arms.diffusion_tree=null"
    output = run(workplace, f"evaluate.py check=lossless dtype=float32 {off}")
    assert "static_diffusion" in output
    assert "tree" not in output


def test_the_thinking_mode_is_remembered_and_another_one_is_warned_of(workplace: Path) -> None:
    for artefact in ("conversations", "ar_drafter", "diffusion_drafter"):
        chat = manifest_of(workplace, artefact)["chat"]
        assert chat == {"enable_thinking": None, "template_kwargs": {}}
    command = "evaluate.py evaluate.limit=1 evaluate.policies=[plain] paths.evaluation=thinking"
    warning = "the ar drafter was trained on conversations rendered with"
    assert warning not in run(workplace, command)
    assert warning in run(workplace, f"{command} chat.enable_thinking=true")


def test_drafters_train_on_conversations_that_another_program_answered(workplace: Path) -> None:
    rows = [{"prompt": f"Question {i}?", "answer": f"Answer {i}."} for i in range(60)]
    (workplace / "answered.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    data = "paths.conversations=answered/conversations"
    run(
        workplace,
        f"data_prep/prepare.py {data} source=file source.file.path=answered.jsonl data.limit=null",
    )
    output = run(workplace, f"train.py task=ar_drafter {data} paths.ar_drafter=answered/ar")
    assert "⟦Answer" in output
    assert (workplace / "answered/ar/model.safetensors").is_file()


def test_a_sweep_over_the_price_makes_a_run_each_and_one_table(workplace: Path) -> None:
    before = manifest_of(workplace, "router")
    output = run(workplace, "train.py -m task=router router.lam=0,10,auto")
    runs = sorted((workplace / "artifacts/tiny/sweeps/router").glob("*/*/router/manifest.json"))
    assert len(runs) == 3
    found = {json.loads(p.read_text())["config"]["router"]["lam"]: p for p in runs}
    assert set(found) == {0, 10, "auto"}
    for path in runs:
        assert json.loads(path.read_text())["replay"]["policies"]["hazard"]["tokens_per_s"] > 0
    assert "router: 3 runs" in output
    assert manifest_of(workplace, "router") == before


def test_wandb_without_a_key_runs_offline_and_says_where(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", str(workplace))
    output = run(workplace, "train.py task=router logger=wandb")
    assert "W&B runs offline" in output
    assert appears(workplace / "artifacts/tiny/runs/router", "*.wandb")
    # A process of its own, as for users, and a W&B service of its own: this process has one that
    # served other tests, and children take what WANDB_SERVICE names.
    monkeypatch.delenv("WANDB_SERVICE", raising=False)
    options = ["logger=wandb", "evaluate.limit=1", "paths.evaluation=tracked"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "evaluate.py"), *options, *common(workplace)],
        cwd=workplace,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "W&B runs offline" in done.stdout
    assert appears(workplace / "tracked", "*.wandb")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "train.py task=router router.lamb=1",
            "router.lamb (command line). Did you mean router.lam",
        ),
        ("train.py tsk=router", "Did you mean task"),
        ("train.py task=routr", "choose from ar_drafter, diffusion_drafter, router"),
        ("train.py", "must also give: task="),
        ("train.py task=router logger=csw", "Did you mean csv"),
        ("train.py task=router router.fit.max_steps=0", "max_steps is 0"),
        ("evaluate.py chekpoint=x", "Did you mean checkpoint"),
        ("evaluate.py evaluate.policies=[plain,hazrd]", "unknown policy 'hazrd'"),
        (
            "evaluate.py evaluate.policies=[plain,static_ar_tree] arms.ar_tree=null",
            "policy static_ar_tree: arms.ar_tree is null, so there is no arm",
        ),
        ("evaluate.py arms.ar_tree.top_k=1", "arms.ar_tree.top_k is 1, but has to be"),
        ("evaluate.py check=lossy", "it must be null, lossless, replay or aa"),
        ("train.py task=router router.leave_out=[poems]", "know no category 'poems'"),
        ("train.py task=router router.arms=[rnn]", "choose from ar, ar_tree, diffusion"),
        (
            "train.py task=router router.width=5000",
            "at most 3,000,000 are allowed: lower the width",
        ),
        ("train.py task=router router.frailty=0", "frailty is 0: it must be null or above 0"),
        ("train.py task=router router.ceiling_folds=1", "it must be 0, or 2 or more"),
        ("evaluate.py arms.draft_lenght=3", "Did you mean arms.draft_length"),
        ("evaluate.py arms.draft_length=3", "'max_draft': 3, 'chat'"),
        (
            "evaluate.py decode.safe_arm=ar_trie",
            "decode.safe_arm is 'ar_trie': choose from plain, ar, ar_tree",
        ),
        (
            "data_prep/generate.py source=file source.file.path=absent.jsonl",
            "no data at absent.jsonl",
        ),
        ("data_prep/generate.py source=file", "must also give: source.file.path="),
        ("data_prep/prepare.py source=[file,gsm9k]", "Did you mean gsm8k"),
        ("data_prep/generate.py engine=opnai", "Did you mean openai"),
        ("data_prep/generate.py source.builtin.weight=0.0", "weight is 0.0: it must be above 0"),
        ("data_prep/generate.py chat.template_file=absent.jinja", "absent.jinja does not exist"),
        (
            "train.py task=ar_drafter paths.conversations=absent",
            "absent does not exist. Make it with: python data_prep/generate.py",
        ),
        (
            "data_prep/log_rounds.py paths.ar_drafter=absent",
            "Make it with: python train.py task=ar_drafter",
        ),
        (
            "train.py task=router paths.costs=absent.json",
            "Make it with: python data_prep/profile_costs.py",
        ),
        (
            "train.py task=ar_drafter ar_drafter.features=cached trainer.devices=2",
            "Make it with: python data_prep/cache_features.py",
        ),
        ("train.py task=ar_drafter target.name=other", "name: the artefact has 'tiny'"),
        (
            "data_prep/profile_costs.py target.tap_layer_ids=[1,2,3]",
            "tap_layer_ids: the artefact has [1, 3, 4], this run has [1, 2, 3]",
        ),
        (
            "train.py task=router resume=true router.width=7",
            "router.width: the artefact has 128, this run has 7",
        ),
        (
            "train.py task=diffusion_drafter resume=true target.mask_token_id=4",
            "target.mask_token_id: the artefact has 3, this run has 4",
        ),
        (
            "evaluate.py target.mask_token_id=4",
            "mask_token_id: the artefact has 3, this run has 4",
        ),
        ("train.py task=ar_drafter target.tap_layer_ids=[1,9]", "each must lie in 0..6"),
        ("train.py task=ar_drafter resume=true hydra.run.dir=elsewhere", "nothing to resume"),
    ],
)
def test_bad_input_is_told_in_one_line_with_what_to_do(
    command: str, message: str, workplace: Path
) -> None:
    done = attempt(workplace, f"{command} paths.artifacts=artifacts/tiny")
    assert done.status == 2
    assert message in done.err.replace("\n", " ")


def test_an_unknown_key_in_an_experiment_file_is_named(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    (tmp_path / "conf/experiment/typo.yaml").write_text(
        "# @package _global_\nrouter:\n  fit: {learing_rate: 1.0}\n"
    )
    with pytest.raises(UserError, match=r"router.fit.learing_rate \(experiment file\).*_rate\?"):
        check_keys(tmp_path / "conf", "train", ["task=router", "experiment=typo"])


def test_a_local_folder_serves_as_target_and_a_file_as_prompts(workplace: Path) -> None:
    source = next((workplace.parent / "cache/targets").iterdir())
    rows = [{"prompt": f"Question {i}?", "category": "own"} for i in range(40)]
    (workplace / "own.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    done = attempt(
        workplace,
        f"data_prep/generate.py target.path={source} target.name=mine "
        "target.tap_layer_ids=[1,3,4] target.mask_token_id=3 source=file "
        "source.file.path=own.jsonl data.limit=null data.validation_fraction=0.2",
        target="hf",
    )
    assert done.status == 0, done.err
    counts = json.loads((workplace / "artifacts/mine/conversations/manifest.json").read_text())[
        "counts"
    ]
    assert sum(split["rows"] for split in counts["splits"].values()) == counts["kept"] == 40


def logged(folder: Path, version: int) -> list[dict[str, str]]:
    """Training rows of a run's metrics.csv, the learning rate of the same step beside the loss."""
    path = folder / f"csv/version_{version}/metrics.csv"
    by_step: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(path.open()):
        by_step.setdefault(row["step"], {}).update({k: v for k, v in row.items() if v})
    return [row for row in by_step.values() if "train/loss" in row]


def test_drafters_learn_from_cached_features_what_they_learn_online(workplace: Path) -> None:
    exact = "dtype=float32 trainer.precision=32-true trainer.log_every=1 features.dtype=float32"
    generated = f"{exact} paths.conversations=exact/conversations paths.features=exact/features"
    run(workplace, f"data_prep/generate.py {generated}")
    assert "GB" in run(workplace, f"data_prep/cache_features.py {generated} features.margin_gb=0.0")
    for task in ("ar_drafter", "diffusion_drafter"):
        losses = {}
        for features in ("online", "cached"):
            folder = f"exact/{task}_{features}"
            run(
                workplace,
                f"train.py task={task} {generated} {task}.features={features} "
                f"hydra.run.dir={folder} paths.{task}={folder}/drafter",
            )
            rows = logged(workplace / folder, 0)
            losses[features] = [float(row["train/loss"]) for row in rows]
        assert len(losses["cached"]) == 20
        assert losses["cached"] == pytest.approx(losses["online"], rel=1e-4)


def test_an_interrupted_training_resumes_to_the_same_losses_and_rates(workplace: Path) -> None:
    options = (
        "train.py task=ar_drafter trainer.log_every=1 trainer.precision=32-true dtype=float32 "
        "ar_drafter.fit.max_steps=20 ar_drafter.fit.checkpoint_every=10"
    )
    run(workplace, f"{options} hydra.run.dir=straight paths.ar_drafter=straight/ar")
    straight = logged(workplace / "straight", 0)
    script, *rest = f"{options} hydra.run.dir=broken paths.ar_drafter=broken/ar".split()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / script), *rest, *common(workplace)],
        cwd=workplace,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    checkpoint = workplace / "broken/checkpoints/last.ckpt"
    while not checkpoint.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert not (workplace / "broken/ar").exists()
    run(workplace, f"{options} hydra.run.dir=broken paths.ar_drafter=broken/ar resume=true")
    resumed = logged(workplace / "broken", 1)
    assert [int(r["step"]) for r in straight] == list(range(20))
    assert int(resumed[0]["step"]) >= 10
    by_step = {r["step"]: r for r in straight}
    for row in resumed:
        for quantity in ("train/loss", "train/tau", "lr-AdamW"):
            expected = float(by_step[row["step"]][quantity])
            assert float(row[quantity]) == pytest.approx(expected, rel=1e-6)
    assert manifest_of(workplace, "../../straight/ar")["metrics"]["val/tau"] == pytest.approx(
        manifest_of(workplace, "../../broken/ar")["metrics"]["val/tau"], rel=1e-6
    )
