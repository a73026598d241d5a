from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.fakes import (
    ODD_SHAPE,
    TAP_SIZE,
    drafted,
    prefilled,
    random_ids,
    random_rows,
    tiny_ar,
    tiny_diffusion,
)
from tests.infer.dialects import (
    AR_DIALECTS,
    DIALECTS,
    EMBEDDING,
    MAPS,
    TAPS,
    TARGET,
    Dialect,
    direct_ar,
    direct_diffusion,
    eagle3_tensors,
    outputs,
)
from whiflash_infer.checkpoint import Drafter, import_drafter, load_drafter
from whiflash_infer.drafters.ar import ARArm, CachedAR
from whiflash_infer.errors import ArtifactError, UserError
from whiflash_infer.exchange import (
    Given,
    Imported,
    detect,
    read_drafter,
    write_drafter,
)
from whiflash_infer.exchange.fields import read_rope, to_layer_inputs, to_layer_outputs
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.target import Target

TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 0}
EVEN_SHAPE = replace(ODD_SHAPE, target_hidden_size=ODD_SHAPE.hidden_size)
LAYOUTS = {"ar": ["eagle3", "speculators"], "diffusion": ["zlab", "speculators"]}


def read(dialect: Dialect, tmp_path: Path, **changes: Any) -> Imported:
    options = {"target": dialect.target, "given": dialect.given, "allow_pickle": dialect.pickled}
    return read_drafter(dialect.write(tmp_path / "theirs"), **{**options, **changes})


def changed(
    dialect: Dialect, change: Callable[[dict[str, Any], dict[str, Tensor]], Any]
) -> Dialect:
    """The dialect with its config and tensors edited in place on copies."""
    config, tensors = json.loads(json.dumps(dialect.config)), dict(dialect.tensors)
    change(config, tensors)
    return replace(dialect, config=config, tensors=tensors)


def expected_net(name: str) -> Drafter:
    if name in AR_DIALECTS:
        return direct_ar(**DIALECTS[name]().flags)
    return direct_diffusion(sliding_window=5 if name == "zlab_sliding" else None)


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_computes_what_the_same_values_do_in_a_net_of_ours(
    name: str, tmp_path: Path
) -> None:
    net, expected = read(DIALECTS[name](), tmp_path).net, expected_net(name)
    for found, wanted in zip(outputs(net), outputs(expected), strict=True):
        assert torch.equal(found, wanted)
    assert net.config == expected.config
    for tensor, value in expected.state_dict().items():
        assert torch.equal(net.state_dict()[tensor], value), tensor


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("safeai", "eagle3"),
        ("automodel", "eagle3"),
        ("zlab_flat", "zlab"),
        ("speculators", "speculators"),
        ("speculators_dflash", "speculators"),
    ],
)
def test_a_layout_is_told_from_the_config(name: str, layout: str) -> None:
    assert detect(DIALECTS[name]().config) == layout


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "without draft_vocab_size"),
        (
            {"architectures": ["DFlash2DraftModel"]},
            "DFlash2DraftModel.*known are.*DFlashDraftModel",
        ),
        ({"architectures": ["A", "B"]}, "known are"),
        ({}, r"architectures is \[\]"),
    ],
)
def test_a_config_of_no_known_layout_is_told_which_ones_are(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        detect(config)


def tensors_of(name: str) -> list[str]:
    return sorted(DIALECTS[name]().tensors)


STRICT = [
    (name, tensor)
    for name in ("vllm", "eagle31", "speculators_qwen3", "zlab", "speculators_dflash")
    for tensor in tensors_of(name)
]


@pytest.mark.parametrize(("name", "tensor"), STRICT)
def test_every_tensor_that_is_missing_or_misshapen_is_named_with_its_shapes(
    name: str, tensor: str, tmp_path: Path
) -> None:
    whole = DIALECTS[name]()
    stored = whole.tensors[tensor]
    longer = torch.cat([stored, stored[:1]])
    misshapen = changed(whole, lambda _, tensors: tensors.update({tensor: longer}))
    with pytest.raises(ArtifactError, match=f"{tensor} has shape.*{len(longer)}") as error:
        read(misshapen, tmp_path / "misshapen")
    assert f"({len(stored)}," in str(error.value)
    lacking = changed(whole, lambda _, tensors: tensors.pop(tensor))
    if tensor in {"d2t", "t2d", "embed_tokens.weight"} or (name, tensor) == (
        "speculators_dflash",
        "lm_head.weight",
    ):
        return  # the other map says the same, and copies of the target's tensors may be left out
    ours = tensor.replace("layers.0.", "midlayer.") if "dflash" not in name else tensor
    ours = tensor if name == "zlab" else ours
    with pytest.raises(ArtifactError, match=f"missing tensor {ours}"):
        read(lacking, tmp_path / "lacking")


@pytest.mark.parametrize("name", ["vllm", "speculators", "zlab", "speculators_dflash"])
@pytest.mark.parametrize(
    "tensor", ["layers.7.mlp.up_proj.weight", "fc.bias", "fc_norm.0.weight", "input_norm.weight"]
)
def test_every_tensor_too_many_is_named(name: str, tensor: str, tmp_path: Path) -> None:
    more = changed(DIALECTS[name](), lambda _, t: t.update({tensor: torch.ones(24)}))
    with pytest.raises(ArtifactError, match=rf"unknown tensor {tensor} of shape \(24,\)"):
        read(more, tmp_path)


def test_one_tensor_under_two_names_is_refused_with_both(tmp_path: Path) -> None:
    twice = changed(
        DIALECTS["vllm"](), lambda _, t: t.update({"model.fc.weight": t["fc.weight"] * 2})
    )
    with pytest.raises(ArtifactError, match=r"tensors fc.weight and model.fc.weight are the same"):
        read(twice, tmp_path)


@pytest.mark.parametrize("name", ["vllm", "speculators", "zlab"])
def test_features_that_do_not_fit_the_layer_ids_are_refused_with_both_numbers(
    name: str, tmp_path: Path
) -> None:
    # Seen in sglang 32226: fc made for three layers, a config that names two.
    def lose_a_layer(config: dict[str, Any], _: dict[str, Tensor]) -> None:
        for home in (config, config.get("dflash_config", {})):
            for field in home:
                if field.endswith("layer_ids"):
                    home[field] = home[field][:2]

    with pytest.raises(ArtifactError, match=r"fc.weight reads 72 features, but 2 layers.* 48"):
        read(changed(DIALECTS[name](), lose_a_layer), tmp_path)


# Target layers, layer inputs counted from the embeddings, layer outputs: specs/eagle3.md 1.1 and,
# for the longer rows, z-lab's formula (specs/dflash.md 1.1) and what vLLM makes of it.
LAYER_IDS = [
    (28, [2, 14, 25], [1, 13, 24]),
    (32, [2, 16, 29], [1, 15, 28]),
    (36, [2, 18, 33], [1, 17, 32]),
    (61, [2, 30, 58], [1, 29, 57]),
    (80, [2, 40, 77], [1, 39, 76]),
    (36, [2, 10, 18, 26, 34], [1, 9, 17, 25, 33]),
    (64, [2, 17, 32, 47, 62], [1, 16, 31, 46, 61]),
]


@pytest.mark.parametrize(("num_layers", "inputs", "layer_outputs"), LAYER_IDS)
def test_layer_ids_are_converted_between_the_two_conventions(
    num_layers: int, inputs: list[int], layer_outputs: list[int], tmp_path: Path
) -> None:
    assert to_layer_inputs(layer_outputs) == inputs
    assert to_layer_outputs(inputs) == layer_outputs
    if len(inputs) != 3:
        return
    said = {"eagle_aux_hidden_state_layer_ids": inputs}
    for number, (name, at_the_top) in enumerate([("vllm", True), ("specforge", False)]):
        dialect = DIALECTS[name]()
        own = said if at_the_top else {"eagle_config": {next(iter(said)): layer_outputs}}
        dialect = replace(dialect, config=dialect.config | own, target=None)
        folder = tmp_path / str(number)
        folder.mkdir()
        given = Given(num_target_layers=num_layers)
        assert read(dialect, folder, given=given).net.config.tap_layer_ids == (*layer_outputs,)


def test_exports_say_the_layers_in_each_readers_convention(tmp_path: Path) -> None:
    def config_of(net: Drafter, layout: str) -> dict[str, Any]:
        path = tmp_path / layout
        write_drafter(net, path, layout=layout, manifest={}, token_ids=TOKEN_IDS)
        return json.loads((path / "config.json").read_text())

    ids = "eagle_aux_hidden_state_layer_ids"
    eagle3 = config_of(direct_ar(), "eagle3")
    assert (eagle3["eagle_config"][ids], eagle3[ids]) == ([1, 3, 4], [2, 4, 5])
    assert config_of(direct_ar(), "speculators")[ids] == [2, 4, 5]
    assert config_of(direct_diffusion(), "zlab")["dflash_config"]["target_layer_ids"] == [1, 3, 4]
    assert config_of(direct_diffusion(), "speculators")["aux_hidden_state_layer_ids"] == [2, 4, 5]


@pytest.mark.parametrize(
    ("name", "ids", "message"),
    [
        ("vllm", None, "layer_ids is missing: say which layers.*--layer-ids"),
        ("vllm", [], "layer_ids is missing"),
        ("vllm", [0, 2, 4], "counted from the embeddings"),
        ("vllm", [4, 2, 5], r"layer ids \[3, 1, 4\] must ascend"),
        ("vllm", [2, 2, 5], "must ascend"),
        ("speculators", [2, 4, 8], r"each must lie in 0..6 .*the last layer excluded"),
        ("speculators_dflash", [2, 4, 9], "each must lie in 0..6"),
        ("zlab", [-1, 3, 4], r"layer ids \[-1, 3, 4\] must ascend, each 0 or more"),
        ("zlab", [1, 3, 7], "each must lie in 0..6"),
        ("zlab", None, "target_layer_ids is missing"),
    ],
)
def test_layer_ids_that_are_missing_or_impossible_are_refused(
    name: str, ids: list[int] | None, message: str, tmp_path: Path
) -> None:
    def put(config: dict[str, Any], _: dict[str, Tensor]) -> None:
        home = config.get("dflash_config", config)
        field = next(key for key in home if key.endswith("layer_ids"))
        home.pop(field) if ids is None else home.update({field: ids})

    with pytest.raises(ArtifactError, match=message):
        read(changed(DIALECTS[name](), put), tmp_path)


def test_two_lists_of_layer_ids_that_disagree_are_refused_unless_the_caller_decides(
    tmp_path: Path,
) -> None:
    def doubt(config: dict[str, Any], _: dict[str, Tensor]) -> None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}

    doubtful = changed(DIALECTS["vllm"](), doubt)
    with pytest.raises(
        ArtifactError, match=r"outputs \[1, 3, 4\]\), but eagle_config has \[2, 4, 5"
    ):
        read(doubtful, tmp_path)
    decided = read_drafter(tmp_path / "theirs", given=Given(tap_layer_ids=(1, 3, 4)))
    assert decided.net.config.tap_layer_ids == TAPS


LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_theta": 500.0}, {"rope_type": "default", "rope_theta": 500.0}),
        (
            {"rope_theta": 500.0, "rope_scaling": None},
            {"rope_type": "default", "rope_theta": 500.0},
        ),
        ({"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, LINEAR),
        ({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}, LINEAR),
        ({"rope_parameters": LINEAR}, LINEAR),
        ({"rope_parameters": LINEAR, "rope_theta": 500.0, "rope_scaling": LINEAR}, LINEAR),
        ({"rope_parameters": LINEAR, "rope_theta": 500.0}, LINEAR),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 500.0}, LINEAR),
        ({"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LINEAR}}, LINEAR),
    ],
)
def test_rotary_positions_are_read_from_both_schemas(
    config: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert read_rope(config, None) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "rope_theta is missing.*--rope-theta"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_theta is missing"),
        ({"rope_parameters": LINEAR, "rope_theta": 10000.0}, "500.0.*but rope_theta is 10000.0"),
        (
            {"rope_parameters": LINEAR, "rope_scaling": {**LINEAR, "factor": 2.0}},
            "'factor': 4.0.*'factor': 2.0",
        ),
        (
            {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_theta": 1}}},
            "differ by layer type",
        ),
        ({"rope_parameters": {**LINEAR, "partial_rotary_factor": 0.25}}, "rotary_factor is 0.25"),
    ],
)
def test_rotary_positions_without_a_base_or_in_two_versions_are_refused(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_rope(config, None)


@pytest.mark.parametrize("layout", ["eagle3", "zlab", "speculators"])
def test_exports_say_rope_in_both_schemas_with_the_sizes_of_the_target(
    layout: str, tmp_path: Path
) -> None:
    rope = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    shape = replace(EVEN_SHAPE, rope_parameters=rope, max_position_embeddings=8192)
    net = tiny_diffusion(shape) if layout == "zlab" else tiny_ar(shape)
    write_drafter(net, tmp_path / "net", layout=layout, manifest={}, token_ids=TOKEN_IDS)
    config = json.loads((tmp_path / "net" / "config.json").read_text())
    config = config.get("transformer_layer_config", config)
    assert config["rope_parameters"] == config["rope_scaling"] == rope
    assert config["rope_theta"] == 500.0
    assert (config["head_dim"], config["max_position_embeddings"]) == (6, 8192)
    assert config["tie_word_embeddings"] is False
    assert read_drafter(tmp_path / "net").net.config.shape == shape


def _round_trip_nets() -> dict[str, Drafter]:
    used = torch.tensor([2, 3, 7, 11, 30, 39])
    return {
        "ar": tiny_ar(EVEN_SHAPE, used=used),
        "ar_all": tiny_ar(EVEN_SHAPE, used=used, flavour="all"),
        "ar_full": tiny_ar(EVEN_SHAPE, used=torch.arange(40)),
        "ar_bf16": tiny_ar(EVEN_SHAPE, used=used).bfloat16(),
        "ar_f16": tiny_ar(EVEN_SHAPE, used=used).half(),
        "diffusion": tiny_diffusion(EVEN_SHAPE),
        "diffusion_window": tiny_diffusion(EVEN_SHAPE, sliding_window=6),
        "diffusion_bf16": tiny_diffusion(EVEN_SHAPE).bfloat16(),
    }


@pytest.mark.parametrize("with_target", [False, True])
@pytest.mark.parametrize("name", _round_trip_nets())
def test_a_drafter_comes_back_bit_by_bit_from_every_layout_and_from_layout_to_layout(
    name: str, with_target: bool, tmp_path: Path
) -> None:
    net = _round_trip_nets()[name]
    target = None
    if with_target:
        tables = {"embedding": random_rows(40, 20, seed=5), "head": random_rows(40, 20, seed=6)}
        target = replace(TARGET, shape=EVEN_SHAPE, **tables)
    manifest = {"license": "mit", "draft_length": 4}
    read_back: Drafter = net
    for step, layout in enumerate(LAYOUTS[name.split("_", maxsplit=1)[0]] * 2):
        path = tmp_path / str(step)
        write_drafter(
            read_back, path, layout=layout, manifest=manifest, token_ids=TOKEN_IDS, target=target
        )
        imported = read_drafter(path, target=target)
        read_back = imported.net
        assert (imported.layout, imported.license) == (layout, "mit")
        assert imported.token_ids == TOKEN_IDS
        assert read_back.config == net.config
        expected = net.state_dict()
        assert read_back.state_dict().keys() == expected.keys()
        for tensor, value in read_back.state_dict().items():
            assert value.dtype == expected[tensor].dtype
            assert torch.equal(value, expected[tensor]), (layout, tensor)
        named = json.loads((path / "config.json").read_text())
        stored = {
            t.dtype for n, t in load_file(path / "model.safetensors").items() if n[1:] != "2d"
        }
        floats = {kind for kind in stored if kind.is_floating_point}
        assert floats == {getattr(torch, named.get("dtype") or named["torch_dtype"])}


@pytest.mark.parametrize("layout", ["eagle3", "zlab"])
def test_a_folder_written_in_a_published_layout_is_one_of_ours(layout: str, tmp_path: Path) -> None:
    net = direct_ar() if layout == "eagle3" else direct_diffusion()
    manifest = {"license": "apache-2.0"}
    write_drafter(net, tmp_path / "net", layout=layout, manifest=manifest, token_ids=TOKEN_IDS)
    loaded, told = load_drafter(tmp_path / "net", made_by="-", dtype=torch.float32, device="cpu")
    assert loaded.config == net.config
    assert told["license"] == "apache-2.0"
    assert json.loads((tmp_path / "net" / "config.json").read_text())["license"] == "apache-2.0"


def test_a_folder_of_ours_in_the_speculators_layout_is_refused_with_the_way_out(
    tmp_path: Path,
) -> None:
    net = direct_ar()
    write_drafter(net, tmp_path / "n", layout="speculators", manifest={}, token_ids=TOKEN_IDS)
    with pytest.raises(ArtifactError, match=r"Eagle3DraftModel.*python -m whiflash_infer.exchange"):
        load_drafter(tmp_path / "n", made_by="-", dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("net", "layout", "message"),
    [
        (direct_ar, "zlab", "this one goes into eagle3 or speculators"),
        (direct_diffusion, "eagle3", "this one goes into zlab or speculators"),
        (lambda: tiny_ar(ODD_SHAPE), "speculators", "hidden_size 20 must be the target's 14"),
        (lambda: tiny_diffusion(ODD_SHAPE), "zlab", "hidden_size 20 must be the target's 14"),
        (lambda: tiny_diffusion(EVEN_SHAPE, markov_rank=4), "speculators", "no Markov head"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused_before_anything_is_written(
    net: Callable[[], Drafter], layout: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        write_drafter(net(), tmp_path / "n", layout=layout, manifest={}, token_ids=TOKEN_IDS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("specforge", "embed_tokens.weight"),
        ("zlab_flat", "model.embed_tokens.weight"),
        ("speculators_dflash", "lm_head.weight"),
    ],
)
def test_a_copy_that_differs_from_the_targets_is_refused_with_the_number_of_rows(
    name: str, tensor: str, tmp_path: Path
) -> None:
    def shift(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[tensor] = tensors[tensor] + torch.tensor([[0.0]] * 37 + [[0.5]] * 3)

    message = f"{tensor} differs from the target's in 3 of 40 rows"
    with pytest.raises(ArtifactError, match=message):
        read(changed(DIALECTS[name](), shift), tmp_path)


def test_a_copy_in_another_type_is_compared_in_the_narrower_one(tmp_path: Path) -> None:
    def round_off(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["embed_tokens.weight"] = EMBEDDING.bfloat16()

    notes = read(changed(DIALECTS["specforge"](), round_off), tmp_path).notes
    assert "embed_tokens.weight is left out: it equals the target's" in notes


def test_a_copy_that_cannot_be_compared_is_told(tmp_path: Path) -> None:
    read_without = read(DIALECTS["specforge"](), tmp_path, target=None)
    assert any("give the target to have them compared" in note for note in read_without.notes)


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("vllm", "vocab_size", 41, "vocab_size is 41, that of the target owner/target is 40"),
        ("vllm", "target_hidden_size", 25, "target_hidden_size is 25.* is 24"),
        ("zlab", "num_target_layers", 9, "num_target_layers is 9, the target has 8 layers"),
    ],
)
def test_a_drafter_of_another_target_is_refused_with_both_sizes(
    name: str, field: str, value: int, message: str, tmp_path: Path
) -> None:
    other = changed(DIALECTS[name](), lambda config, _: config.update({field: value}))
    with pytest.raises(ArtifactError, match=message):
        read(other, tmp_path, target=TARGET)


def test_what_was_filled_in_or_differs_from_the_target_is_told(tmp_path: Path) -> None:
    notes = read(
        DIALECTS["safeai"](), tmp_path, given=Given(tap_layer_ids=TAPS, rope_theta=10000.0)
    )
    told = "\n".join(notes.notes)
    for expected in (
        "layer ids are those given",
        "head_dim is missing, so it is hidden_size / heads = 6",
        "rope_theta': 10000.0}, the target's",
        "max_position_embeddings raised from 64 to the target's 256",
        "the config says float16, the tensors are float32",
    ):
        assert expected in told
    assert notes.net.config.shape.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("vllm", "num_hidden_layers", 2, "'num_hidden_layers' is 2, this version reads 1"),
        ("vllm", "attention_bias", True, "'attention_bias' is True, this version reads False"),
        ("vllm", "mlp_bias", True, "'mlp_bias' is True"),
        ("vllm", "partial_rotary_factor", 0.25, "'partial_rotary_factor' is 0.25"),
        ("vllm", "parallel_heads", 2, "'parallel_heads' is 2, which this version does not know"),
        ("vllm", "quantization_config", {"bits": 4}, "quantization_config"),
        ("vllm", "norm_before_residual", True, "'norm_before_residual' is True"),
        ("modelopt", "num_aux_hidden_states", 4, "'num_aux_hidden_states' is 4"),
        ("vllm", "eagle_config", {"use_aux_hidden_state": False}, "use_aux_hidden_state' is False"),
        ("vllm", "eagle_config", {"norm_before_fc": True}, "'eagle_config.norm_before_fc' is True"),
        ("vllm", "layer_types", ["sliding_attention"], "'layer_types' is"),
        ("vllm", "hidden_act", "no_such_act", "hidden_act 'no_such_act'"),
        ("speculators", "norm_before_residual", True, "'norm_before_residual' is True"),
        (
            "speculators",
            "norm_before_fc",
            True,
            "norm_before_fc' is True, this version reads False",
        ),
        ("speculators", "speculators_model_type", "mtp", "speculators_model_type is 'mtp'; known"),
        ("zlab", "is_causal", True, "'is_causal' is True"),
        ("zlab", "model_type", "llama", "'model_type' is 'llama', this version reads 'qwen3'"),
        ("zlab_nested", "output_multiplier", 2.0, "'output_multiplier' is 2.0"),
        ("zlab_sliding", "is_causal", None, "is_causal is missing: layers with a sliding window"),
        ("zlab_sliding", "is_causal", True, "'is_causal' is True, this version reads False"),
        ("zlab_sliding", "layer_types", ["sliding_attention", "full_attention"], "'layer_types'"),
        ("speculators_dflash", "draft_vocab_size", 32, "draft_vocab_size is 32 of 40"),
        ("speculators_dflash", "sample_from_anchor", True, "convention is 'next_token'"),
        ("speculators_dflash", "projector_type", "domino", "'projector_type' is 'domino'"),
        ("speculators_dflash", "shift_label", True, "'shift_label' is True"),
    ],
)
def test_a_field_that_would_change_the_output_is_refused_with_what_is_read(
    name: str, field: str, value: Any, message: str, tmp_path: Path
) -> None:
    other = changed(DIALECTS[name](), lambda config, _: config.update({field: value}))
    with pytest.raises(ArtifactError, match=message):
        read(other, tmp_path)


def test_a_field_that_the_caller_knows_to_be_harmless_is_let_through(tmp_path: Path) -> None:
    other = changed(DIALECTS["vllm"](), lambda config, _: config.update(parallel_heads=2))
    read(other, tmp_path, given=Given(ignored_fields=frozenset({"parallel_heads"})))


@pytest.mark.parametrize("name", ["vllm", "zlab", "speculators", "speculators_dflash"])
def test_every_field_without_which_a_drafter_cannot_be_built_is_named(
    name: str, tmp_path: Path
) -> None:
    config = DIALECTS[name]().config
    needed = {
        "vllm": ["hidden_size", "vocab_size", "rms_norm_eps", "hidden_act", "intermediate_size"],
        "zlab": ["hidden_size", "block_size", "num_hidden_layers", "max_position_embeddings"],
        "speculators": ["transformer_layer_config", "norm_before_residual"],
        "speculators_dflash": ["mask_token_id", "draft_vocab_size", "block_size"],
    }[name]
    for field in needed:
        assert field in config
        lacking = changed(DIALECTS[name](), lambda config, _, field=field: config.pop(field))
        with pytest.raises(ArtifactError, match=field):
            read(lacking, tmp_path / field)


def test_the_number_of_target_layers_is_asked_for_where_nothing_says_it(tmp_path: Path) -> None:
    path = DIALECTS["speculators_dflash"]().write(tmp_path / "theirs")
    with pytest.raises(ArtifactError, match=r"num_target_layers is missing.*--num-target-layers"):
        read_drafter(path)
    assert read_drafter(path, given=Given(num_target_layers=8)).net.config == (
        direct_diffusion().config
    )


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        ({}, "missing tensors d2t and t2d: draft_vocab_size is 6 of 40"),
        ({"d2t": MAPS["d2t"][:5]}, r"d2t has shape \(5,\).*asks for \(6,\)"),
        ({"t2d": MAPS["t2d"][:39]}, r"t2d has shape \(39,\).*asks for \(40,\)"),
        ({"d2t": MAPS["d2t"].float()}, "d2t has shape.*float32.*whole numbers"),
        ({"d2t": MAPS["d2t"] + 1}, "name 6 tokens, 6 of 0..39 expected"),
        ({"d2t": torch.tensor([1, 0, 5, 8, 26, 34])}, "d2t leads to 5 tokens from 6 draft ids"),
        ({"t2d": torch.arange(40) < 7}, "name 7 tokens, 6 of 0..39"),
        ({**MAPS, "t2d": torch.arange(40) < 6}, "t2d marks other tokens than d2t"),
    ],
)
def test_vocabulary_maps_that_cannot_be_are_refused(
    maps: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    dialect = replace(DIALECTS["vllm"](), tensors=eagle3_tensors(**maps))
    with pytest.raises(ArtifactError, match=message):
        read(dialect, tmp_path)


@pytest.mark.parametrize("kept", ["d2t", "t2d"])
def test_one_map_is_made_from_the_other(kept: str, tmp_path: Path) -> None:
    dialect = replace(DIALECTS["vllm"](), tensors=eagle3_tensors(**{kept: MAPS[kept]}))
    imported = read(dialect, tmp_path)
    for name, value in MAPS.items():
        assert torch.equal(imported.net.state_dict()[name], value)
    assert any("is made from the other" in note for note in imported.notes)


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS["ar"])
def test_a_reduced_vocabulary_comes_back_with_the_same_maps_and_drafts(
    layout: str, target: Target, tmp_path: Path
) -> None:
    used = torch.tensor([2, 3, 5, *range(9, 261, 4)])
    net = tiny_ar(target.drafter_shape, used=used, tap_size=TAP_SIZE)
    write_drafter(net, tmp_path / "n", layout=layout, manifest={}, token_ids=TOKEN_IDS)
    stored = load_file(tmp_path / "n" / "model.safetensors")
    assert stored["d2t"].tolist() == [token - j for j, token in enumerate(used.tolist())]
    assert stored["t2d"].nonzero().flatten().tolist() == used.tolist()
    read_back = read_drafter(tmp_path / "n").net
    assert isinstance(read_back, ARDrafter)
    for name in ("d2t", "t2d"):
        assert torch.equal(read_back.state_dict()[name], stored[name])

    def drafts(drafter: ARDrafter) -> list[int]:
        found: list[int] = []
        for seed in range(6):
            arm = ARArm(CachedAR(drafter, target.tables), draft_length=4)
            texts, _ = prefilled(target, random_ids(8, seed=seed))
            found += drafted(arm, texts, 4)
        return found

    expected = drafts(net)
    assert drafts(read_back) == expected
    assert set(expected) <= set(used.tolist())
    assert len(set(expected)) > 4


def test_a_tied_drafter_is_read_untied_and_written_untied(tmp_path: Path) -> None:
    # SpecForge 139, SPI 74 and sglang 33964: a tied head was lost, or crashed on its shape.
    tied = changed(DIALECTS["vllm"](), lambda config, _: config.update(tie_word_embeddings=True))
    net = read(tied, tmp_path).net
    assert torch.equal(
        net.state_dict()["lm_head.weight"], DIALECTS["vllm"]().tensors["lm_head.weight"]
    )
    write_drafter(net, tmp_path / "o", layout="eagle3", manifest={}, token_ids=TOKEN_IDS)
    assert json.loads((tmp_path / "o" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_tied_targets_tables_are_both_written(tmp_path: Path) -> None:
    tied = replace(TARGET, embedding=EMBEDDING, head=EMBEDDING)
    net = direct_diffusion()
    path = tmp_path / "net"
    write_drafter(net, path, layout="speculators", manifest={}, token_ids=TOKEN_IDS, target=tied)
    stored = load_file(path / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], EMBEDDING)
    assert torch.equal(stored["embed_tokens.weight"], EMBEDDING)


def test_a_drafter_without_a_head_needs_the_target(tmp_path: Path) -> None:
    with pytest.raises(
        ArtifactError, match=r"lm_head.weight: it is the target's, so give the target"
    ):
        read(DIALECTS["targets_head"](), tmp_path, target=None)


def test_a_type_mixed_drafter_is_read_without_rounding(tmp_path: Path) -> None:
    def widen(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name, tensor in list(tensors.items()):
            if tensor.is_floating_point() and name != "norm.weight":
                tensors[name] = tensor.bfloat16()

    net = read(changed(DIALECTS["zlab"](), widen), tmp_path).net
    assert net.norm.weight.dtype == torch.float32
    assert torch.equal(net.norm.weight, direct_diffusion().norm.weight)


def test_a_public_drafter_is_loaded_in_the_type_asked_for_with_what_is_known_of_it(
    tmp_path: Path,
) -> None:
    path = DIALECTS["specforge"]().write(tmp_path / "theirs")
    (path / "README.md").write_text("---\nlanguage: en\nlicense: llama3.1\n---\n# A head\n")
    net, manifest = import_drafter(path, dtype=torch.float64, device="cpu", target=TARGET)
    assert net.fc.weight.dtype == torch.float64
    assert not net.training
    assert not any(p.requires_grad for p in net.parameters())
    assert manifest["license"] == "llama3.1"
    assert manifest["tap_layer_ids"] == [1, 3, 4]
    assert (manifest["source"], manifest["source_layout"]) == (str(path), "eagle3")


def test_the_draft_length_is_the_one_a_speculators_config_proposes(tmp_path: Path) -> None:
    assert read(DIALECTS["speculators"](), tmp_path).draft_length == 3


# What the engines look for by name: specs/eagle3.md 4.1, 4.2 and 4.4, specs/dflash.md 4.1 and 4.3.
SGLANG_EAGLE3 = {
    "fc.weight": (24, 72),
    "midlayer.input_layernorm.weight": (24,),
    "midlayer.hidden_norm.weight": (24,),
    "midlayer.post_attention_layernorm.weight": (24,),
    "midlayer.self_attn.q_proj.weight": (24, 48),
    "midlayer.self_attn.k_proj.weight": (12, 48),
    "midlayer.self_attn.v_proj.weight": (12, 48),
    "midlayer.self_attn.o_proj.weight": (24, 24),
    "midlayer.mlp.gate_proj.weight": (28, 24),
    "midlayer.mlp.up_proj.weight": (28, 24),
    "midlayer.mlp.down_proj.weight": (24, 28),
    "norm.weight": (24,),
    "lm_head.weight": (6, 24),
    "d2t": (6,),
    "t2d": (40,),
}
ZLAB_LAYER = {
    "self_attn.q_proj.weight": (24, 24),
    "self_attn.k_proj.weight": (12, 24),
    "self_attn.v_proj.weight": (12, 24),
    "self_attn.o_proj.weight": (24, 24),
    "self_attn.q_norm.weight": (6,),
    "self_attn.k_norm.weight": (6,),
    "mlp.gate_proj.weight": (28, 24),
    "mlp.up_proj.weight": (28, 24),
    "mlp.down_proj.weight": (24, 28),
    "input_layernorm.weight": (24,),
    "post_attention_layernorm.weight": (24,),
}
ZLAB = {f"layers.{i}.{name}": size for i in (0, 1) for name, size in ZLAB_LAYER.items()}
ZLAB |= {"fc.weight": (24, 72), "hidden_norm.weight": (24,), "norm.weight": (24,)}
SPECULATORS_EAGLE3 = {
    name.replace("midlayer.", "layers.0."): size for name, size in SGLANG_EAGLE3.items()
} | {"embed_tokens.weight": (40, 24)}
SPECULATORS_DFLASH = ZLAB | {"embed_tokens.weight": (40, 24), "lm_head.weight": (40, 24)}
CONTRACTS = [
    (direct_ar, "eagle3", "LlamaForCausalLMEagle3", SGLANG_EAGLE3),
    (direct_ar, "speculators", "Eagle3DraftModel", SPECULATORS_EAGLE3),
    (direct_diffusion, "zlab", "DFlashDraftModel", ZLAB),
    (direct_diffusion, "speculators", "DFlashDraftModel", SPECULATORS_DFLASH),
]


@pytest.mark.parametrize(("net", "layout", "architecture", "expected"), CONTRACTS)
def test_exported_names_and_shapes_are_those_that_the_engines_load(
    net: Callable[[], Drafter],
    layout: str,
    architecture: str,
    expected: dict[str, tuple[int, ...]],
    tmp_path: Path,
) -> None:
    write_drafter(
        net(), tmp_path / "n", layout=layout, manifest={}, token_ids=TOKEN_IDS, target=TARGET
    )
    stored = load_file(tmp_path / "n" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == expected
    config = json.loads((tmp_path / "n" / "config.json").read_text())
    assert config["architectures"] == [architecture]


def test_a_speculators_config_says_every_flag_the_verifier_and_the_number_of_drafts(
    tmp_path: Path,
) -> None:
    net = direct_ar(norm_output=True)
    write_drafter(
        net,
        tmp_path / "n",
        layout="speculators",
        manifest={"draft_length": 3},
        token_ids=TOKEN_IDS,
        target=TARGET,
    )
    config = json.loads((tmp_path / "n" / "config.json").read_text())
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert [config[flag] for flag in flags] == [False, False, False, True]
    assert config["speculators_config"] == {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": 3,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]},
    }
    assert config["transformer_layer_config"]["model_type"] == "llama"
    write_drafter(
        direct_diffusion(), tmp_path / "d", layout="speculators", manifest={}, token_ids=TOKEN_IDS
    )
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert (config["block_size"], config["mask_token_id"]) == (5, 39)
    assert (config["sample_from_anchor"], config["sliding_window_non_causal"]) == (False, True)


def test_an_export_of_the_whole_vocabulary_has_no_maps_and_reads_back_the_same(
    tmp_path: Path,
) -> None:
    """vLLM stops at maps that it has no place for."""
    net = direct_ar(full=True)
    write_drafter(net, tmp_path / "e", layout="eagle3", manifest={}, token_ids=TOKEN_IDS)
    tensors = load_file(tmp_path / "e" / "model.safetensors")
    assert {"d2t", "t2d"}.isdisjoint(tensors)
    ours, _ = load_drafter(tmp_path / "e", made_by="", dtype=torch.float32, device="cpu")
    for again in (read_drafter(tmp_path / "e").net, ours):
        assert isinstance(again, ARDrafter)
        assert again.vocabulary().tolist() == list(range(40))
        for found, expected in zip(outputs(again), outputs(net), strict=True):
            assert torch.equal(found, expected)
