"""Every configured plug-in is loaded and its signature bound before anything starts."""

import pytest
from argument_helpers import parse
from plugin_checks import check_plugins

from slime.arguments.all_flags import all_specs
from slime.plugins import PLUGIN_POINTS, check_plugin, configured_plugins

POINTS = {point.flag: point for point in PLUGIN_POINTS}


@pytest.fixture
def plugin(tmp_path):
    """Write source to a file and name the function `f` in it."""

    def write(source: str, name: str = "f") -> str:
        file = tmp_path / f"plugin_{len(list(tmp_path.iterdir()))}.py"
        file.write_text(source)
        return f"{file}:{name}"

    return write


def check(flag: str, path: str):
    return check_plugin(POINTS[flag], path, "--" + flag.replace("_", "-"))


def test_every_path_flag_is_a_plug_in_point():
    not_plugins = {"custom_config_path", "megatron_config_path"}
    paths = {name for name in all_specs() if name.endswith(("_path", "_middleware_paths"))} - not_plugins
    assert paths | {"curriculum"} == set(POINTS)  # it takes names of the catalog as well


@pytest.mark.parametrize("flag", [f for f, p in POINTS.items() if p.style != "class"])
def test_function_with_exactly_the_documented_parameters_is_accepted(plugin, flag):
    point = POINTS[flag]
    parameters = ", ".join(
        [*point.positional, *(f"{name}=False" for name in (*point.keywords, *point.optional))]
    )
    start = "async def" if point.style == "async" else "def"
    check(flag, plugin(f"{start} f({parameters}): pass"))


@pytest.mark.parametrize("flag", [f for f, p in POINTS.items() if p.style != "class"])
def test_function_that_takes_anything_is_accepted(plugin, flag):
    start = "async def" if POINTS[flag].style == "async" else "def"
    check(flag, plugin(f"{start} f(*args, **kwargs): pass"))


@pytest.mark.parametrize("flag", [f for f, p in POINTS.items() if p.style != "class"])
def test_function_with_a_parameter_too_many_is_refused(plugin, flag):
    point = POINTS[flag]
    start = "async def" if point.style == "async" else "def"
    parameters = ", ".join([*point.positional, "surprise", *(f"{name}=False" for name in point.keywords)])
    with pytest.raises(
        ValueError, match=r"expected .*, found f\(.*surprise.*\) \(missing a required argument: 'surprise'\)"
    ):
        check(flag, plugin(f"{start} f({parameters}): pass"))


def test_further_parameters_with_defaults_are_allowed(plugin):
    check("custom_rm_path", plugin("async def f(args, sample, scale=1.0, **kwargs): pass"))


def test_missing_parameter_names_flag_path_expected_and_found(plugin):
    path = plugin("async def f(args, sample): pass")
    with pytest.raises(ValueError) as error:
        check("custom_generate_function_path", path)
    message = str(error.value)
    for part in ("--custom-generate-function-path", path, "args, sample, sampling_params", "f(args, sample)"):
        assert part in message


def test_keyword_the_caller_passes_must_be_accepted(plugin):
    with pytest.raises(ValueError, match="unexpected keyword argument 'evaluation'"):
        check("rollout_function_path", plugin("def f(args, rollout_id, data_source): pass"))


def test_sync_where_async_is_needed_is_refused(plugin):
    with pytest.raises(
        ValueError, match=r"--custom-generate-function-path .*it is awaited, but it is not async"
    ):
        check("custom_generate_function_path", plugin("def f(args, sample, sampling_params): pass"))


def test_a_reward_may_be_a_plain_function(plugin):
    check("custom_rm_path", plugin("def f(args, sample): pass"))


def test_async_where_sync_is_needed_is_refused(plugin):
    with pytest.raises(ValueError, match="called without await, but it is async"):
        check("dynamic_sampling_filter_path", plugin("async def f(args, samples): pass"))


def test_sample_hook_may_be_either(plugin):
    check("rollout_sample_hook_path", plugin("def f(args, sample): pass"))
    check("rollout_sample_hook_path", plugin("async def f(args, sample, rollout_id=None): pass"))


def test_wrapped_and_callable_objects_count_as_what_they_call(plugin):
    source = """
import functools
async def reward(args, sample, scale): pass
f = functools.partial(reward, scale=2)
class Reward:
    async def __call__(self, args, sample): pass
g = Reward()
@functools.wraps(reward)
def h(*args): return reward(*args, 1)
"""
    for name in "fg":
        check("custom_rm_path", plugin(source, name))
    with pytest.raises(ValueError, match="'scale'"):
        check("custom_rm_path", plugin(source, "h"))


def test_missing_module_is_named():
    with pytest.raises(
        ValueError, match=r"--custom-rm-path is no_such_pkg.reward: No module named 'no_such_pkg'"
    ):
        check("custom_rm_path", "no_such_pkg.reward")


def test_missing_file_is_named():
    with pytest.raises(ValueError, match=r"--custom-rm-path is nowhere/reward.py:f: no such plug-in file"):
        check("custom_rm_path", "nowhere/reward.py:f")


def test_missing_function_is_named_with_what_is_there(plugin):
    with pytest.raises(ValueError, match=r"has no 'g'; it defines f"):
        check("custom_rm_path", plugin("async def f(args, sample): pass", "g"))


def test_path_without_a_module_is_refused():
    with pytest.raises(ValueError, match="'reward' is not an import path"):
        check("custom_rm_path", "reward")


def test_thing_that_cannot_be_called_is_refused(plugin):
    with pytest.raises(ValueError, match="found a int, which cannot be called"):
        check("custom_rm_path", plugin("f = 3"))


def test_module_that_fails_to_import_is_reported_with_the_cause(plugin):
    with pytest.raises(ValueError, match="importing it raised ZeroDivisionError: division by zero"):
        check("custom_rm_path", plugin("1 / 0"))


def test_data_source_must_offer_its_methods(plugin):
    source = "class f:\n    def __init__(self, args): pass\n    def get_samples(self, n): pass\n"
    with pytest.raises(ValueError, match="the class has no add_samples, save, load"):
        check("data_source_path", plugin(source))


def test_data_source_is_made_from_args_alone(plugin):
    with pytest.raises(ValueError, match="missing a required argument: 'other'"):
        check("data_source_path", plugin("class f:\n    def __init__(self, args, other): pass\n"))


def test_defaults_and_all_configured_paths_are_checked(plugin):
    hook = plugin("def f(args, sample): pass")
    args = parse("--rollout-sample-hook-path", hook, "--rollout-sample-hook-path", hook)
    checked = [(point.flag, path) for point, path, _ in configured_plugins(args)]
    assert checked.count(("rollout_sample_hook_path", hook)) == 2
    assert "slime.rollout.sglang_rollout.generate_rollout" in dict(checked).values()
    check_plugins(args)


def test_path_of_an_evaluation_dataset_is_checked_and_named(plugin, tmp_path):
    data = tmp_path / "a.jsonl"
    data.write_text("{}\n")
    config = tmp_path / "eval.yaml"
    config.write_text(
        f"datasets: [{{name: a, path: {data}, custom_rm_path: {plugin('def f(args): pass')!r}}}]"
    )
    with pytest.raises(ValueError, match=r"custom_rm_path of evaluation dataset 'a' is .*positional"):
        check_plugins(parse("--eval-config", str(config)))
