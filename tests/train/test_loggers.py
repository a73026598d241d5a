"""Where numbers, results and configurations go; and what must never go anywhere."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from matplotlib import image
from omegaconf import OmegaConf, open_dict, read_write
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import ArtifactRecord, Record  # pyright: ignore

from tests.stages import ROOT, attempt, common, run
from tests.tiny_training import Stop, Training
from whiflash_infer.errors import UserError
from whiflash_train import loggers
from whiflash_train.entry import hide_secrets
from whiflash_train.redaction import is_secret_name, without_secrets

SHORT = (
    "train.py task=ar_drafter ar_drafter.fit.max_steps=4 ar_drafter.fit.val_every=2 "
    "trainer.log_every=1"
)
OPTIONS: dict[str, Any] = {"project": "p", "name": "n", "entity": None, "tags": []}
KEY = "0123456789abcdef0123456789abcdef01234567"
_BLOCK, _HEADER = 32768, 7  # of W&B's files, which are LevelDB logs


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with conversations."""
    folder = tmp_path_factory.mktemp("loggers") / "work"
    folder.mkdir()
    run(folder, "data_prep/generate.py")
    return folder


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No key, no settings, and no W&B service of other tests."""
    wandb.teardown()
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    yield
    wandb.teardown()


def records(folder: Path) -> list[Record]:
    """What the W&B runs of a folder hold, in order of their start."""
    wandb.teardown()  # the process that writes them ends with all of it on the disk
    found = []
    for path in sorted(folder.rglob("*.wandb")):
        for content in _log_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(content)
            found.append(record)
    return found


def _log_records(data: bytes) -> Iterator[bytes]:
    at, parts = _HEADER, b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + _HEADER])
        parts += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def artifacts(folder: Path) -> list[ArtifactRecord]:
    return [r.artifact for r in records(folder) if r.HasField("artifact")]


def history(folder: Path) -> list[dict[str, Any]]:
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in h.item}
        for h in (r.history for r in records(folder) if r.HasField("history"))
    ]


def steps(folder: Path) -> list[int]:
    rows = history(folder)
    return [row["trainer/global_step"] for row in rows if "trainer/global_step" in row]


def run_ids(folder: Path) -> list[str]:
    return [r.run.run_id for r in records(folder) if r.HasField("run")]


def config_of(folder: Path) -> dict[str, Any]:
    """The last value of every key, over what was told at the start and later."""
    told: dict[str, Any] = {}
    for record in records(folder):
        for part in (record.run.config, record.config):
            told |= {i.key or i.nested_key[0]: json.loads(i.value_json) for i in part.update}
    return told


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, "W&B runs offline: no API key"),
        ({"WANDB_MODE": "offline", "WANDB_API_KEY": KEY}, "W&B runs offline"),
        (
            {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": KEY},
            "W&B runs offline: W&B cannot be used",
        ),
        ({"WANDB_MODE": "disabled"}, None),
    ],
    ids=["no key", "offline", "no network", "disabled"],
)
def test_a_training_with_wandb_runs_to_its_end(  # U116
    environment: dict[str, str],
    told: str | None,
    workplace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"WANDB_INIT_TIMEOUT": "1", **environment}.items():
        monkeypatch.setenv(name, value)
    assert not sys.stdin.isatty()
    made = tmp_path / "made"
    output = run(
        workplace, f"{SHORT} logger=wandb hydra.run.dir={tmp_path}/run paths.ar_drafter={made}"
    )
    assert (made / "manifest.json").is_file()
    if told is None:
        assert "offline" not in output
        assert not any((tmp_path / "run").rglob("*wandb*"))
    else:
        assert told in output
        (folder,) = (tmp_path / "run/wandb").glob("offline-run-*")
        assert f"wandb sync {folder}" in output
        assert steps(tmp_path / "run")[-1] == 3  # of steps 0 to 3
        (drafter,) = artifacts(tmp_path / "run")
        assert (drafter.type, drafter.name) == ("drafter", "tiny-ar_drafter")
        assert set(drafter.aliases) == {"best", "latest"}
        files = {entry.path for entry in drafter.manifest.contents}
        assert files == {path.name for path in made.iterdir()}
        assert "metrics" in json.loads(drafter.metadata)


def test_no_secret_is_in_any_file_of_a_run_whatever_the_logger(  # U116
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = {f"planted{i}planted" for i in range(6)}
    url_password, query, field, value, server_key, _ = sorted(planted)
    wandb_key = f"planted5planted{'0' * 25}"
    variables = {"HF_TOKEN": value, "MY_SERVER": server_key, "WANDB_API_KEY": wandb_key}
    for name, secret in {**variables, "WANDB_MODE": "offline"}.items():
        monkeypatch.setenv(name, secret)
    urls = f"http://me:{url_password}@host/v1,https://host/v1?api_key={query}"
    options = (
        f"engine=openai engine.urls=['{urls.replace(',', chr(39) + ',' + chr(39))}'] "
        f"+engine.extra_body.hf_token={field} engine.api_key_env=MY_SERVER "
        f"evaluate.note=with:{value}:and:{server_key}"
    )
    for logger in ("wandb", "tensorboard"):
        folder = tmp_path / logger
        done = attempt(
            workplace,
            f"{SHORT} logger={logger} hydra.run.dir={folder}/run paths.ar_drafter={folder}/made "
            f"{options}",
        )
        assert done.status == 0, done.err
    sweep = f"-m seed=0 logger=csv hydra.sweep.dir={tmp_path}/sweep {options}"
    assert attempt(workplace, f"{SHORT} {sweep}").status == 0
    wandb.teardown()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    kinds = {"config.yaml", "overrides.yaml", "hydra.yaml", "hparams.yaml", "multirun.yaml"}
    assert kinds < {path.name for path in files}
    assert any(path.suffix == ".wandb" for path in files)
    found = {
        (str(path.relative_to(tmp_path)), secret)
        for path in files
        for secret in planted
        if secret.encode() in path.read_bytes()
    }
    assert found == set()
    kept = OmegaConf.load(tmp_path / "sweep/0/.hydra/config.yaml")
    assert OmegaConf.select(kept, "engine.urls")[0] == "http://***@host/v1"
    assert OmegaConf.select(kept, "engine.api_key_env") == "MY_SERVER"


def test_a_configuration_that_another_process_is_writing_is_hidden_without_reading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose(
            "train", ["task=ar_drafter", "+hf_token=0xBEEFBEEF"], return_hydra_config=True
        )
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        cfg.hydra.runtime.output_dir = str(tmp_path)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    HydraConfig.instance().set_config(cfg)
    kept = tmp_path / ".hydra"
    kept.mkdir()
    for name in ("config.yaml", "hydra.yaml", "overrides.yaml"):
        (kept / name).write_text("half: [written, hf_token=0xBEEFBEEF\nand then")
    hide_secrets(OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]))
    assert OmegaConf.load(kept / "config.yaml").hf_token == "***"
    assert "+hf_token=***" in OmegaConf.load(kept / "overrides.yaml")
    assert sorted(path.name for path in kept.iterdir()) == [
        *("config.yaml", "hydra.yaml", "overrides.yaml")
    ]
    assert not any("0xBEEFBEEF" in path.read_text() for path in kept.iterdir())


def test_a_resumed_training_goes_on_in_its_wandb_run_and_no_step_goes_back(
    tmp_path: Path,
) -> None:
    def train(name: str, *, resume: bool, **options: Any) -> None:
        logger = loggers.wandb_logger(output_dir=str(tmp_path / name), resume=resume, **OPTIONS)
        training = Training(folder=tmp_path / name, options=("trainer.log_every=1",), **options)
        try:
            training.run(resume=resume, logger=logger)
        finally:
            loggers.close_logger(logger)

    train("whole", resume=False)
    with pytest.raises(InterruptedError):
        train("broken", resume=False, callbacks=(Stop(14),))
    train("broken", resume=True)
    assert len(set(run_ids(tmp_path / "broken"))) == 1
    assert len(list((tmp_path / "broken/wandb").glob("offline-run-*"))) == 2
    once, twice = steps(tmp_path / "whole"), steps(tmp_path / "broken")
    assert twice == sorted(twice)
    assert set(twice) == set(once) == set(range(20))
    train("broken", resume=False)
    assert len(set(run_ids(tmp_path / "broken"))) == 2


def test_two_runs_of_one_process_are_two_wandb_runs_and_both_are_closed(
    workplace: Path, tmp_path: Path
) -> None:
    sweep = f"-m seed=0,1 logger=wandb hydra.sweep.dir={tmp_path}/sweep"
    assert attempt(workplace, f"{SHORT} {sweep}").status == 0
    assert wandb.run is None
    ids = []
    for index in (0, 1):
        folder = tmp_path / f"sweep/{index}"
        ids += set(run_ids(folder))
        assert [r.exit.exit_code for r in records(folder) if r.HasField("exit")] == [0]
        assert [made.name for made in artifacts(folder)] == ["tiny-ar_drafter"]
    assert len(set(ids)) == 2


def test_a_training_that_fails_is_a_failed_wandb_run(workplace: Path, tmp_path: Path) -> None:
    diverges = (
        "train.py task=ar_drafter dtype=float32 trainer.precision=32-true logger=wandb "
        "ar_drafter.fit.learning_rate=1e30 ar_drafter.fit.max_skipped=2"
    )
    done = attempt(workplace, f"{diverges} hydra.run.dir={tmp_path}/run paths.ar_drafter=none")
    assert done.status == 2
    found = records(tmp_path / "run")
    assert [r.exit.exit_code for r in found if r.HasField("exit")] == [1]
    assert artifacts(tmp_path / "run") == []


def artefact(folder: Path, name: str) -> Path:
    """A folder with a manifest and weights, as trainings leave one."""
    path = folder / name
    path.mkdir(parents=True)
    manifest = {"target": {"name": "tiny"}, "metrics": {"val/tau": 1.5}, "made": name}
    (path / "manifest.json").write_text(json.dumps(manifest))
    (path / "model.safetensors").write_bytes(name.encode() * 100)
    return path


def test_a_router_and_its_evaluation_name_the_very_drafters_that_were_trained(
    tmp_path: Path,
) -> None:
    names = ("ar_drafter", "diffusion_drafter", "router", "rounds", "conversations")
    paths = {name: artefact(tmp_path / "made", name) for name in names}
    paths |= {"costs": tmp_path / "costs.json", "visited_rounds": tmp_path / "none"}
    paths["costs"].write_text("{}")
    for task in names[:3]:
        folder = tmp_path / task
        logger = loggers.wandb_logger(output_dir=str(folder), **OPTIONS)
        loggers.log_result(logger, task, paths, paths[task])
        loggers.close_logger(logger)
    trained = {task: artifacts(tmp_path / task)[-1] for task in names[:3]}
    uses = {made.name: made for made in artifacts(tmp_path / "router")[:-1]}
    assert set(uses) == {"tiny-ar_drafter", "tiny-diffusion_drafter"}
    for task in ("ar_drafter", "diffusion_drafter"):
        used = uses[f"tiny-{task}"]
        assert used.use_after_commit
        assert not trained[task].use_after_commit
        assert (used.digest, used.type) == (trained[task].digest, "drafter")
    told = json.loads(trained["router"].metadata)
    assert told["metrics"] == {"val/tau": 1.5}
    assert len(told["made_from"]["rounds"]) == len(told["made_from"]["costs"]) == 16
    assert told["made_from"]["visited_rounds"] is None
    assert trained["router"].type == "router"

    evaluated = evaluation(tmp_path / "evaluation")
    inputs = {task: paths[task] for task in names[:3]}
    target = "whiflash_train.loggers.wandb_logger"
    loggers.log_evaluation(
        {"_target_": target, **OPTIONS}, str(evaluated), metrics(), inputs=inputs
    )
    found = {made.name: made for made in artifacts(evaluated)}
    for task in names[:3]:
        assert found[f"tiny-{task}"].use_after_commit
        assert found[f"tiny-{task}"].digest == trained[task].digest
    inputs_told = config_of(evaluated)["inputs"]
    assert inputs_told["router"] == {"artifact": "tiny-router", "digest": trained["router"].digest}


def test_a_drafter_that_a_later_training_replaces_stays_in_the_offline_run(tmp_path: Path) -> None:
    made = artefact(tmp_path, "ar_drafter")
    logger = loggers.wandb_logger(output_dir=str(tmp_path / "run"), **OPTIONS)
    loggers.log_result(logger, "ar_drafter", {"conversations": tmp_path}, made)
    loggers.close_logger(logger)
    made.rename(tmp_path / "aside")
    (tmp_path / "aside/model.safetensors").unlink()
    (logged,) = artifacts(tmp_path / "run")
    weights = next(e for e in logged.manifest.contents if e.path == "model.safetensors")
    assert Path(weights.local_path).read_bytes() == b"ar_drafter" * 100
    assert Path(weights.local_path).is_relative_to(tmp_path / "run")


def cell(tokens_per_s: float) -> dict[str, Any]:
    return {
        "prompts": 2,
        "tokens_per_s": tokens_per_s,
        "speedup_ci": [1.1, 1.4],
        "regret": None,
        "time_split": {"draft": 0.25, "verify": 0.75},
        "lags": {"edges": [0, 1], "counts": [3, 4]},
    }


def metrics() -> dict[str, Any]:
    report = {
        "overall": cell(20.0),
        "by_category": {"code": cell(30.0), "chat": cell(10.0)},
        "by_kind": {"prose": cell(15.0)},
        "by_prompt_length": {"64": cell(20.0)},
    }
    return {
        "header": {"target": "tiny", "seed": 0, "suite": {"a": "file"}},
        "policies": {"plain": report, "hazard": report},
        "claims": [{"claim": "c", "paper": "p", "here": "h", "holds": None}],
        "ablation": [{"policy": "hazard", "varied": "sync", "value": "lazy", "speedup": 1.5}],
    }


def evaluation(folder: Path) -> Path:
    (folder / "plots").mkdir(parents=True)
    image.imsave(folder / "plots/gain.png", [[0.0, 1.0], [1.0, 0.0]])
    for name in ("report.html", "answers.parquet", "rounds.parquet", "notes.txt"):
        (folder / name).write_text(name)
    (folder / "metrics.json").write_text(json.dumps(metrics()))
    return folder


def test_an_evaluation_in_wandb_has_numbers_tables_pictures_and_its_files(tmp_path: Path) -> None:
    folder = evaluation(tmp_path / "evaluation")
    settings = {"_target_": "whiflash_train.loggers.wandb_logger", **OPTIONS}
    config = {"evaluate": {"limit": 3}, "api_key": "s3cret"}
    loggers.log_evaluation(settings, str(folder), metrics(), config=config)
    (row,) = history(folder)
    assert row["eval/hazard/tokens_per_s"] == 20.0
    assert row["eval/hazard/code/tokens_per_s"] == 30.0
    assert row["eval/plain/speedup_ci_low"] == 1.1
    assert row["plots/gain/_type"] == "image-file"
    tables = {name.split("/")[1] for name in row if name.startswith("tables/")}
    parts = {"overall", "by_category", "by_kind", "by_prompt_length"}
    assert tables == parts | {"claims", "ablation"}
    told = config_of(folder)
    assert (told["evaluate"], told["header"]["target"]) == ({"limit": 3}, "tiny")
    assert told["api_key"] == "***"
    (path,) = (folder / "wandb").rglob("by_category*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"][:4] == ["policy", "category", "prompts", "tokens_per_s"]
    assert [line[:4] for line in table["data"]] == [
        ["plain", "code", 2, 30.0],
        ["plain", "chat", 2, 10.0],
        ["hazard", "code", 2, 30.0],
        ["hazard", "chat", 2, 10.0],
    ]
    made = {a.name: a for a in artifacts(folder)}["tiny-evaluation"]
    files = {entry.path for entry in made.manifest.contents}
    assert files == {"report.html", "metrics.json", "answers.parquet", "rounds.parquet"}
    assert made.type == "evaluation"


def test_an_evaluation_in_a_disabled_wandb_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    folder = evaluation(tmp_path / "evaluation")
    settings = {"_target_": "whiflash_train.loggers.wandb_logger", **OPTIONS}
    loggers.log_evaluation(settings, str(folder), metrics())
    assert not (folder / "wandb").exists()


def test_an_evaluation_in_tensorboard_has_numbers_pictures_and_conditions(tmp_path: Path) -> None:
    folder = evaluation(tmp_path / "evaluation")
    settings = {"_target_": "whiflash_train.loggers.tensorboard_logger"}
    loggers.log_evaluation(settings, str(folder), metrics(), config={"evaluate": {"limit": 3}})
    events = EventAccumulator(str(folder / "tensorboard/version_0")).Reload()
    (scalar,) = events.Scalars("eval/hazard/code/tokens_per_s")
    assert scalar.value == 30.0
    (picture,) = events.Images("gain")
    assert (picture.width, picture.height) == (2, 2)
    kept = OmegaConf.load(folder / "tensorboard/version_0/hparams.yaml")
    assert OmegaConf.select(kept, "evaluate.limit") == 3
    assert OmegaConf.select(kept, "header.suite.a") == "file"


@pytest.mark.parametrize("logger", ["csv_logger", "no_logger"])
def test_an_evaluation_is_in_its_files_alone_with_other_loggers(
    logger: str, tmp_path: Path
) -> None:
    folder = evaluation(tmp_path / "evaluation")
    before = sorted(folder.rglob("*"))
    loggers.log_evaluation({"_target_": f"whiflash_train.loggers.{logger}"}, str(folder), metrics())
    assert sorted(folder.rglob("*")) == before


def test_tensorboard_has_the_curves_of_a_training_and_of_its_resumption(tmp_path: Path) -> None:
    def train(*, resume: bool, **options: Any) -> None:
        logger = loggers.tensorboard_logger(output_dir=str(tmp_path), resume=resume)
        training = Training(folder=tmp_path, options=("trainer.log_every=1",), **options)
        training.run(resume=resume, logger=logger)

    with pytest.raises(InterruptedError):
        train(resume=False, callbacks=(Stop(14),))
    train(resume=True)
    first, second = (
        EventAccumulator(str(tmp_path / f"tensorboard/version_{i}")).Reload() for i in (0, 1)
    )
    assert [event.step for event in first.Scalars("train/loss")] == list(range(14))
    assert [event.step for event in second.Scalars("train/loss")] == list(range(10, 20))
    assert {"val/tau", "lr-AdamW"} <= set(second.Tags()["scalars"])


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_logger_whose_package_is_missing_is_told_with_the_remedy(
    package: str, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"logger={package}.*pip install 'whiflash\[train\]'"):
        loggers.require_logger({"_target_": f"whiflash_train.loggers.{package}_logger"})
    done = attempt(workplace, f"{SHORT} logger={package} hydra.run.dir={tmp_path}/run")
    assert done.status == 2
    assert f"logger={package} needs the package {package}" in done.err
    assert "Traceback" not in done.err


def test_a_mode_that_wandb_does_not_have_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    with pytest.raises(UserError, match="WANDB_MODE is 'nonsense': choose online, offline"):
        loggers.wandb_logger(output_dir=str(tmp_path), **OPTIONS)


def test_without_any_logger_package_a_training_logs_csv(  # U117
    workplace: Path, tmp_path: Path
) -> None:
    block = "import sys; sys.modules |= dict.fromkeys(['wandb', 'tensorboard', 'tensorboardX']); "
    run_it = f"import runpy; runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')"
    command = [
        *SHORT.split()[1:],
        f"hydra.run.dir={tmp_path}/run",
        f"paths.ar_drafter={tmp_path}/d",
    ]
    done = subprocess.run(
        [sys.executable, "-c", block + run_it, *common(workplace), *command],
        cwd=workplace,
        env={k: v for k, v in os.environ.items() if not k.startswith("WANDB_")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "train/loss" in (tmp_path / "run/csv/version_0/metrics.csv").read_text()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pw@host/v1", "http://***@host/v1"),
        ("http://pw@host:80/v1", "http://***@host:80/v1"),
        ("https://h/v1?a=1&token=pw&sig=pw", "https://h/v1?a=1&token=***&sig=***"),
        ("engine.urls=[http://a/v1?api_key=pw]", "engine.urls=[http://a/v1?api_key=***]"),
        ("+engine.extra_body={apiKey: pw, top_p: 1}", "+engine.extra_body={apiKey: ***, top_p: 1}"),
        ('x={"password": "p w"}', 'x={"password": ***}'),
        ("Authorization: Bearer pw.pw", "Authorization: ***"),
        ("Bearer pw.pw", "Bearer ***"),
        ("hf_abcdefghijklmnopqrstuvwx", "***"),
        ("from the-value-of-it on", "from *** on"),
        ("max_new_tokens=5", "max_new_tokens=5"),
        ("engine.api_key_env=MY_KEY", "engine.api_key_env=MY_KEY"),
        ("api_key=null", "api_key=null"),
        ("mask_token=<m>", "mask_token=<m>"),
        ("target.path=org/model", "target.path=org/model"),
    ],
)
def test_secrets_in_a_text_are_hidden_and_nothing_else(
    text: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER_API_KEY", "the-value-of-it")
    assert without_secrets(text) == shown


def test_a_field_is_hidden_by_its_name_or_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVER", "value-of-my-server")
    config = {
        "api_key_env": "MY_SERVER",
        "note": ["value-of-my-server", 1],
        "headers": {"Authorization": "pw", "x-api-key": "pw", "n": 1},
        "password": 1234,
        "wandb_token": "pw",
        "credentials": {"user": "pw", "keys": ["pw"]},
        "token": 17,
        "secret": None,
        "client_secret": "",
        "max_tokens": 5,
        "eos_token": "</s>",
    }
    assert without_secrets(config) == {
        "api_key_env": "MY_SERVER",
        "note": ["***", 1],
        "headers": {"Authorization": "***", "x-api-key": "***", "n": 1},
        "password": "***",
        "wandb_token": "***",
        "credentials": {"user": "***", "keys": ["***"]},
        "token": 17,
        "secret": None,
        "client_secret": "",
        "max_tokens": 5,
        "eos_token": "</s>",
    }
    assert without_secrets({"api_key_env": "sk-the-key-itself"}) == {"api_key_env": "***"}


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "awsSecretKey"])
def test_these_names_are_secret(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("entry", ["train", "generate", "prepare", "log_rounds", "evaluate"])
def test_nothing_of_our_own_configuration_looks_like_a_secret(entry: str) -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose(entry, overrides=["engine=openai", "logger=wandb"])
    plain = OmegaConf.to_container(cfg, resolve=False)
    assert without_secrets(plain) == plain
