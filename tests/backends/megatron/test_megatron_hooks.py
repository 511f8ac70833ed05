"""A user's functions take part in the Megatron trainer where the plug-in page says."""

import pytest

pytest.importorskip("megatron.core")

from megatron_helpers import GRPO, in_processes, make_family, megatron_args, train

pytestmark = pytest.mark.megatron

SOURCE = """
seen = []

def init(args):
    from megatron.core import parallel_state

    seen.append(("init", parallel_state.get_pipeline_model_parallel_world_size()))

def before_log_prob(args, model, store_prefix):
    seen.append(("log_prob", store_prefix, len(model)))

def before_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    seen.append(("step", rollout_id, step_id, opt_param_scheduler.num_steps, opt_param_scheduler.get_lr()))
    for group in optimizer.param_groups:
        assert group["params"] is not None
    for chunk in model:
        for parameter in chunk.parameters():
            assert not parameter.main_grad.any(), "gradients are zero before the step"

def provide(pre_process, post_process, build=None):
    model = build()
    seen.append(("model", pre_process, post_process))
    model.marked = True
    return model

def provide_wrongly(pre_process, post_process):
    return "no model"
"""


def run(rank, world_size, model, file):
    from slime.backends.megatron import create_backend
    from slime.utils.misc import load_function

    paths = dict(
        custom_megatron_init_path=f"{file}:init",
        custom_megatron_before_log_prob_hook_path=f"{file}:before_log_prob",
        custom_megatron_before_train_step_hook_path=f"{file}:before_step",
        custom_model_provider_path=f"{file}:provide",
    )
    settings = dict(GRPO, optimizer="sgd", pp=2, lr_warmup_iters=2)
    result = train(create_backend, megatron_args(model, **settings, **paths), rank, world_size)
    found = {"seen": list(load_function(f"{file}:seen")), "marked": result["backend"].model[0].module.marked}
    try:
        wrong = megatron_args(model, **settings, custom_model_provider_path=f"{file}:provide_wrongly")
        create_backend(wrong, rank=rank, world_size=world_size, device="cpu")
    except ValueError as error:
        found["refused"] = str(error)
    return found


def test_functions_are_called_in_order(tmp_path):
    file = tmp_path / "hooks.py"
    file.write_text(SOURCE)
    found = in_processes(2, run, tmp_path, make_family(tmp_path / "model", "qwen3"), str(file))
    assert found["marked"]
    assert found["seen"] == [
        ("init", 2),
        ("model", True, False),
        ("log_prob", "ref_", 1),
        ("log_prob", "", 1),
        ("step", 0, 0, 0, pytest.approx(0.05)),
        ("step", 0, 1, 1, pytest.approx(0.1)),
        ("step", 0, 2, 2, pytest.approx(0.1)),
    ]
    assert "returned a str" in found["refused"] and "take the `build` keyword" in found["refused"]
