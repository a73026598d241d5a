from __future__ import annotations

import csv
import html
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.stages import ROOT, Outcome, common, patched_argv, run
from whiflash_infer.errors import UserError
from whiflash_train import tradeoff
from whiflash_train.entry import check_keys, check_plugins
from whiflash_train.sweep_results import curve_points, curves, read_sweep

EXACT = "dtype=float32 trainer.precision=32-true"


def speeds(**by_category: float) -> dict[str, Any]:
    """A policy of 2 tokens a round; its throughput over all is the mean."""
    mean = sum(by_category.values()) / len(by_category)
    return {
        "tokens_per_s": mean,
        "tau": 2.0,
        "seconds_per_round": 2.0 / mean,
        "switches_per_100_rounds": 5.0,
        "by_category": {
            name: {"tokens_per_s": value, "tau": 2.0, "conversations": 3}
            for name, value in by_category.items()
        },
    }


def at(tau: float, seconds: float) -> dict[str, Any]:
    """A policy with tau tokens and so many seconds a round."""
    made = speeds(code=tau / seconds)
    return {**made, "tau": tau, "seconds_per_round": seconds}


STATICS = {"plain": at(1.0, 0.05), "static_ar": at(1.5, 0.0625)}


def manifest(
    hazard: Mapping[str, Any],
    *,
    lam: float = 20.0,
    setting: float | str | None = None,
    statics: Mapping[str, Any] = STATICS,
    train_on: list[str] | None = None,
    leave_out: list[str] | None = None,
) -> dict[str, Any]:
    router = {"lam": lam if setting is None else setting}
    router |= {"train_on": train_on, "leave_out": leave_out}
    policies = {**statics, "entropy": at(9.0, 0.01), "hazard": dict(hazard)}
    numbers = {"calibration_error": 0.1, "regret": 0.2, "share_of_oracle": 0.9}
    return {"config": {"router": router}, "replay": {"lam": lam, "policies": policies, **numbers}}


def add_run(
    sweep: Path,
    name: str,
    overrides: Iterable[str] = (),
    made: Mapping[str, Any] | None = None,
    *,
    task: str = "router",
) -> None:
    folder = sweep / name
    (folder / ".hydra").mkdir(parents=True)
    listed = [f"task={task}", *overrides]
    (folder / ".hydra/overrides.yaml").write_text(yaml.safe_dump(listed))
    (folder / ".hydra/config.yaml").write_text(yaml.safe_dump({"task": task}))
    if made is not None:
        (folder / task).mkdir()
        (folder / task / "manifest.json").write_text(json.dumps(made))


def price_sweep(folder: Path) -> Path:
    """Throughputs of 20, 25, 24 and 26 tokens/s."""
    add_run(folder, "0", ["router.lam=0"], manifest(at(2.0, 0.1), lam=0.0))
    add_run(folder, "1", ["router.lam=40"], manifest(at(1.25, 0.05), lam=40.0))
    add_run(folder, "2", ["router.lam=10"], manifest(at(1.8, 0.075), lam=10.0))
    add_run(folder, "10", ["router.lam=auto"], manifest(at(1.56, 0.06), lam=26.0, setting="auto"))
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


def drawn_points(page: str) -> list[dict[str, Any]]:
    """The traces of a page, read as a browser would."""
    data = re.search(r'Plotly\.newPlot\(\s*"[^"]+",\s*(\[.*?\]),\s*\{"', page, re.DOTALL)
    assert data is not None
    return json.loads(data[1])


def test_the_csv_holds_what_the_runs_replayed_in_the_order_of_their_numbers(
    tmp_path: Path,
) -> None:
    assert tradeoff.main([str(price_sweep(tmp_path))]) == 0
    rows = rows_of(tmp_path / "tradeoff.csv")
    assert [row["run"] for row in rows] == ["0", "1", "2", "10", "", ""]
    assert [row["policy"] for row in rows] == ["hazard"] * 4 + ["plain", "static_ar"]
    wanted = [20.0, 25.0, 24.0, 26.0, 20.0, 24.0]
    assert [float(row["tokens_per_s"]) for row in rows] == pytest.approx(wanted)
    assert [float(row["tokens_per_round"]) for row in rows] == [2.0, 1.25, 1.8, 1.56, 1.0, 1.5]
    assert [row["lam"] for row in rows] == ["0.0", "40.0", "10.0", "26.0", "", ""]
    assert [row["automatic"] for row in rows] == ["false"] * 3 + ["true"] + ["false"] * 2
    assert [row["overrides"] for row in rows[:2]] == ["router.lam=0", "router.lam=40"]
    assert rows[0]["share_of_oracle"] == "0.9"
    assert rows[4]["share_of_oracle"] == ""


def test_the_page_holds_every_point_and_loads_nothing(tmp_path: Path) -> None:
    tradeoff.main([str(price_sweep(tmp_path))])
    page = (tmp_path / "tradeoff.html").read_text()
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*\b(?:src|href)\s*=", page)
    traces = {trace.get("name"): trace for trace in drawn_points(page)}
    fixed = traces["router, fixed price"]
    assert sorted(zip(fixed["x"], fixed["y"], strict=True)) == [(50, 1.25), (75, 1.8), (100, 2.0)]
    star = traces["router, automatic price"]
    assert (star["x"], star["y"], star["marker"]["symbol"]) == ([60.0], [1.56], "star")
    assert star["marker"]["color"] == pytest.approx([26.0])
    assert traces["static arm"]["text"] == ["plain", "static_ar"]
    # Joined in the order of the price: 0, 10, 26 (automatic), 40.
    assert traces["growing price"]["x"] == [100.0, 75.0, 60.0, 50.0]
    for told in ("run 10", "router.lam=auto", "26.00 tokens/s", "5.0 switches in 100 rounds"):
        assert told in star["hovertext"][0]


def test_a_line_of_equal_throughput_goes_through_the_origin(tmp_path: Path) -> None:
    tradeoff.main([str(price_sweep(tmp_path))])
    page = (tmp_path / "tradeoff.html").read_text()
    dashed = [t for t in drawn_points(page) if t.get("line", {}).get("dash") == "dash"]
    assert len(dashed) >= 3
    for line in dashed:
        assert (line["x"][0], line["y"][0]) == (0, 0)
    found = {round(1000 * line["y"][1] / line["x"][1], 6) for line in dashed}
    assert {20.0, 25.0} <= found or {20.0, 24.0} <= found


def test_what_the_user_typed_is_shown_as_typed(tmp_path: Path) -> None:
    typed = "router.note=</script><script>alert(1)</script><b>x"
    add_run(tmp_path, "0", [typed], manifest(at(2.0, 0.1)))
    add_run(tmp_path, "1", ["router.note=plain"], manifest(at(2.0, 0.09)))
    tradeoff.main([str(tmp_path)])
    page = (tmp_path / "tradeoff.html").read_text()
    assert "<script>alert" not in page
    shown = [text for trace in drawn_points(page) for text in trace.get("hovertext", [])]
    assert html.escape(typed) in shown[0]


def test_the_picture_shows_something(tmp_path: Path) -> None:
    tradeoff.main([str(price_sweep(tmp_path))])
    picture = matplotlib.image.imread(tmp_path / "tradeoff.png")[..., :3]
    assert picture.shape[1] >= 1000
    assert 0.02 < float((picture < 0.9).any(-1).mean()) < 0.6
    colours = np.unique((picture.reshape(-1, 3) * 8).round(), axis=0)
    assert len(colours) > 20


@pytest.mark.parametrize("runs", [1, 2, 30])
def test_one_run_equal_runs_and_many_runs_can_be_drawn(runs: int, tmp_path: Path) -> None:
    for index in range(runs):
        add_run(tmp_path, str(index), [f"seed={index}"], manifest(at(2.0, 0.1)))
    assert tradeoff.main([str(tmp_path)]) == 0
    assert len(rows_of(tmp_path / "tradeoff.csv")) == runs + 2


def test_runs_are_joined_only_where_they_differ_in_the_price_alone(tmp_path: Path) -> None:
    for index, (lam, margin) in enumerate([(20, 0), (0, 0), (0, 1), (20, 1), (5, 2)]):
        overrides = [f"router.lam={lam}", f"router.switch_margin={margin}"]
        add_run(tmp_path, str(index), overrides, manifest(at(2.0, 0.1), lam=float(lam)))
    found = curves(curve_points(read_sweep(tmp_path).runs))
    assert {group: [p.run for p in members] for group, members in found.items()} == {
        "router.switch_margin=0": ["1", "0"],
        "router.switch_margin=1": ["2", "3"],
    }


def test_runs_that_failed_or_lack_numbers_are_told_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    price_sweep(tmp_path)
    add_run(tmp_path, "3", ["router.lam=-1"])
    (tmp_path / "3/error.txt").write_text("router.lam is -1: it must be 0 or more\n")
    add_run(tmp_path, "4", ["router.lam=5"])
    add_run(tmp_path, "5", ["router.lam=6"], {"config": {}})
    add_run(tmp_path, "6", ["router.lam=7"], manifest({**at(2.0, 0.1), "tau": None}))
    assert tradeoff.main([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "run 3: router.lam is -1: it must be 0 or more" in told
    assert "run 4: it ended before it wrote router/manifest.json" in told
    assert "has no number for replay.lam: train it again" in told
    assert "has no number for replay.policies.hazard.tau" in told
    assert [row["run"] for row in rows_of(tmp_path / "tradeoff.csv")[:4]] == ["0", "1", "2", "10"]


def test_a_folder_without_runs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tradeoff.main([str(tmp_path)]) == 2
    assert "holds no runs" in capsys.readouterr().err


def test_a_sweep_of_drafters_ends_with_what_they_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index, tau in enumerate((1.625, 1.75)):
        made = {"metrics": {"val/tau": tau, "step": 600}}
        add_run(tmp_path, str(index), [f"seed={index}"], made, task="ar_drafter")
    assert tradeoff.main([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "ar_drafter: 2 runs" in told
    assert "1.625" in told
    assert "1.75" in told
    assert not (tmp_path / "tradeoff.csv").exists()


def shift_sweep(folder: Path) -> Path:
    """Best static arms: code 20 (plain), json 40 (static_ar), over all 25 (static_ar)."""
    statics = {"plain": speeds(code=20.0, json=20.0), "static_ar": speeds(code=10.0, json=40.0)}
    trained = [
        ({"train_on": ["json"]}, speeds(code=18.0, json=44.0)),
        ({"train_on": ["code"]}, speeds(code=25.0, json=36.0)),
        ({"leave_out": ["json"]}, speeds(code=24.0, json=42.0)),
        ({}, speeds(code=22.0, json=48.0)),
        ({}, speeds(code=24.0, json=46.0)),
    ]
    for index, (data, hazard) in enumerate(trained):
        add_run(folder, str(index), [f"seed={index}"], manifest(hazard, statics=statics, **data))
    return folder


def test_the_matrix_is_the_gain_over_the_best_static_arm_of_each_tested_category(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tradeoff.main([str(shift_sweep(tmp_path))]) == 0
    rows = rows_of(tmp_path / "shift.csv")
    found = {(row["trained_on"], row["tested_on"]): float(row["gain"]) for row in rows}
    wanted = {
        ("json", "code"): 18 / 20 - 1,
        ("json", "json"): 44 / 40 - 1,
        ("json", "every category"): 31 / 25 - 1,
        ("code", "code"): 25 / 20 - 1,
        ("code", "json"): 36 / 40 - 1,
        ("code", "every category"): 30.5 / 25 - 1,
        ("all", "code"): 23 / 20 - 1,
        ("all", "json"): 47 / 40 - 1,
        ("all", "every category"): 35 / 25 - 1,
        ("all but json", "code"): 24 / 20 - 1,
        ("all but json", "json"): 42 / 40 - 1,
        ("all but json", "every category"): 33 / 25 - 1,
    }
    assert found == pytest.approx(wanted)
    marked = {(row["trained_on"], row["tested_on"]): row["relation"] for row in rows}
    assert {pair: relation for pair, relation in marked.items() if relation} == {
        ("json", "json"): "alone",
        ("code", "code"): "alone",
        ("all but json", "json"): "left out",
    }
    assert {row["best_static"] for row in rows if row["tested_on"] == "code"} == {"plain"}
    told = capsys.readouterr().out
    assert "all but json" in told
    assert "-10.0 %" in told
    page = (tmp_path / "shift.html").read_text()
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*\b(?:src|href)\s*=", page)
    (heat,) = (trace for trace in drawn_points(page) if trace["type"] == "heatmap")
    assert heat["y"] == ["json", "code", "all", "all but json"]
    assert len(np.unique(matplotlib.image.imread(tmp_path / "shift.png"))) > 20


def test_there_is_no_matrix_where_all_routers_saw_the_same(tmp_path: Path) -> None:
    tradeoff.main([str(price_sweep(tmp_path))])
    assert not (tmp_path / "shift.csv").exists()


# A task that takes no time, in a sweep of the real entry point and configuration.
SCRIPT = """
import json
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from whiflash_infer.errors import UserError
from whiflash_train.entry import entry_point
from whiflash_train.sweeps import monitored


@entry_point("train", root=Path({root!r}), sweep_goes_on=True)
def main(cfg):
    if cfg.seed == 13:
        raise UserError("seed is 13: bad luck")
    speed = 30.0 - abs(cfg.router.width - 96) / 10
    policy = {{"tokens_per_s": speed, "tau": 2.0, "seconds_per_round": 2.0 / speed,
              "switches_per_100_rounds": 1.0, "by_category": {{}}}}
    replay = {{"lam": 20.0, "policies": {{"hazard": policy, "plain": policy}}}}
    folder = Path(HydraConfig.get().runtime.output_dir) / cfg.task
    folder.mkdir()
    made = {{"config": {{"router": {{"lam": "auto"}}}}, "replay": replay}}
    (folder / "manifest.json").write_text(json.dumps(made))
    return monitored(cfg, {{"val/tokens_per_s": speed, "val/tau": 2.0}})


if __name__ == "__main__":
    main()
"""


def sweep(folder: Path, command: str) -> Outcome:
    """Type the command behind the script in `folder`."""
    script = folder / "quick.py"
    script.write_text(SCRIPT.format(root=str(ROOT)))
    words = shlex.split(command)
    flags = [word for word in words if word.startswith("-")]
    settings = [word for word in words if word not in flags]
    argv = [str(script), *flags, "target=tiny", "hydra.sweep.dir=sweep", *settings]
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with chdir(folder), redirect_stdout(out), redirect_stderr(err), patched_argv(argv):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as stop:
            status = int(stop.code or 0)
    return Outcome(status, out.getvalue(), err.getvalue())


def sweep_alone(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """As `sweep`, in a process of its own."""
    (folder / "quick.py").write_text(SCRIPT.format(root=str(ROOT)))
    typed = [sys.executable, "quick.py", "target=tiny", "hydra.sweep.dir=sweep"]
    return subprocess.run(
        [*typed[:2], *shlex.split(command), *typed[2:]],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_failed_run_does_not_end_its_sweep_but_its_exit_status_says_so(tmp_path: Path) -> None:
    done = sweep(tmp_path, "-m task=router seed=0,13,1")
    assert done.status == 2, done.out + done.err
    assert "seed is 13: bad luck" in done.err
    assert "router: 2 runs in" in done.out
    assert "left out: run 1: seed is 13: bad luck" in done.out
    rows = rows_of(tmp_path / "sweep/tradeoff.csv")
    assert [row["run"] for row in rows] == ["0", "2", ""]


def test_a_run_repeated_in_the_same_folder_forgets_its_error(tmp_path: Path) -> None:
    assert sweep(tmp_path, "-m task=router seed=13").status == 2
    assert (tmp_path / "sweep/0/error.txt").read_text() == "seed is 13: bad luck\n"
    done = sweep(tmp_path, "-m task=router seed=1")
    assert done.status == 0, done.out + done.err
    assert not (tmp_path / "sweep/0/error.txt").exists()


@pytest.mark.slow
def test_joblib_runs_side_by_side_and_tells_a_failed_run(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    joblib = "hydra/launcher=joblib hydra.launcher.n_jobs=2 threads=1"
    # In a process of its own: what the checks of types wrap around functions cannot be sent away.
    done = sweep_alone(tmp_path, f"-m task=router router.width=64,96 seed=13,1 {joblib}")
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout.count("router: 2 runs in") == 1
    for index in (0, 2):
        assert f"left out: run {index}: seed is 13: bad luck" in done.stdout
    rows = rows_of(tmp_path / "sweep/tradeoff.csv")[:2]
    assert [row["run"] for row in rows] == ["1", "3"]
    assert [float(row["tokens_per_s"]) for row in rows] == pytest.approx([26.8, 30.0])


def test_optuna_keeps_the_trial_whose_monitored_metric_is_highest(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    options = "hydra.sweeper.n_trials=8 'router.width=choice(64,96,128)'"
    done = sweep(tmp_path, f"task=router +sweep=router_optuna {options}")
    assert done.status == 0, done.out + done.err
    best = yaml.safe_load((tmp_path / "sweep/optimization_results.yaml").read_text())
    rows = rows_of(tmp_path / "sweep/tradeoff.csv")[:8]
    assert len(rows) == 8
    assert best["best_value"] == max(float(row["tokens_per_s"]) for row in rows)
    assert best["best_params"]["router.width"] == 96


def test_what_optuna_searches_exists(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        chosen = ["task=router", "+sweep=router_optuna"]
        cfg = compose("train", overrides=chosen, return_hydra_config=True)
    searched = [f"{key}={values}" for key, values in cfg.hydra.sweeper.params.items()]
    assert all(o.is_sweep_override() for o in OverridesParser.create().parse_overrides(searched))
    check_keys(ROOT / "conf", "train", ["task=router", *searched])


def test_a_launcher_that_is_not_installed_is_named_with_what_brings_it() -> None:
    with pytest.raises(UserError, match=r"no hydra/launcher/nowhere.*whiflash\[sweeps\]"):
        check_plugins(ROOT / "conf", "train", ["task=router", "hydra/launcher=nowhere"])


def documented_commands() -> list[str]:
    page = (ROOT / "docs/sweeps.md").read_text()
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", "".join(blocks)).splitlines()
    return [re.sub(r"\s+#.*", "", line) for line in lines if "train.py" in line]


@pytest.mark.parametrize("command", documented_commands())
def test_a_documented_sweep_composes(command: str) -> None:
    arguments = [word for word in shlex.split(command)[2:] if "=" in word]
    try:
        check_plugins(ROOT / "conf", "train", arguments)
    except UserError as error:
        pytest.skip(str(error))
    check_keys(ROOT / "conf", "train", arguments)
    # Hydra's own keys, which check_keys leaves to Hydra; the first value of what is swept.
    parsed = OverridesParser.create().parse_overrides(arguments)
    fixed = [o.input_line for o in parsed if o.input_line and not o.is_sweep_override()]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", overrides=fixed, return_hydra_config=True)
    assert cfg.hydra.callbacks.table._target_ == "whiflash_train.sweeps.SweepTable"


def test_the_docs_name_every_launcher() -> None:
    commands = "\n".join(documented_commands())
    for launcher in ("joblib", "submitit_local", "submitit_slurm", "ray"):
        assert f"hydra/launcher={launcher}" in commands
    assert "+sweep=router_optuna" in commands


def test_a_sweep_with_wandb_is_a_group_with_a_run_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    done = sweep(tmp_path, "-m task=router seed=0,1 logger=wandb")
    assert done.status == 0, done.out + done.err
    assert "W&B runs offline" in done.out
    (logged,) = (tmp_path / "sweep/wandb").glob("offline-run-*")
    (file,) = logged.glob("*.wandb")
    until = time.monotonic() + 30  # another process writes it
    while b"router-sweep" not in (content := file.read_bytes()) and time.monotonic() < until:
        time.sleep(0.1)
    assert b"router-sweep" in content
    assert b"tiny/router/sweep" in content
    kinds = {path.suffix for path in (logged / "files/media").rglob("*") if path.is_file()}
    assert kinds == {".png", ".html", ".json"}
    assert "WANDB_RUN_GROUP" not in os.environ


@pytest.mark.slow
def test_a_real_training_sweeps_with_joblib_and_leaves_a_drafter_each(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    folder = tmp_path / "work"
    folder.mkdir()
    run(folder, "data_prep/generate.py")
    command = (
        f"-m task=ar_drafter {EXACT} threads=1 seed=0,1 ar_drafter.fit.max_steps=2 "
        "hydra/launcher=joblib hydra.launcher.n_jobs=2 hydra.sweep.dir=swept"
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *command.split(), *common(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ar_drafter: 2 runs in swept" in done.stdout
    for index in (0, 1):
        made = folder / f"swept/{index}/ar_drafter"
        assert (made / "model.safetensors").is_file()
        assert json.loads((made / "manifest.json").read_text())["config"]["seed"] == index
