"""Templates for schedulers and the Dockerfile: they parse, and flags, files and targets in them are ours."""

import re
import subprocess
import tomllib

import pytest
import yaml
from docs_world import ROOT

from slime.arguments.parser import build_parser, known_options

LAUNCHERS = sorted((ROOT / "launchers").iterdir())
DOCKERFILE = (ROOT / "Dockerfile").read_text()


# Fields of the RayJob and RayCluster schemas of KubeRay (ray.io/v1) and of pods that the file has, with their
# types; a cluster refuses what its schemas do not have.
POD = {"spec": {"containers": list, "volumes": list}}
GROUP = {"rayStartParams": dict, "template": POD}
WORKERS = GROUP | {"groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int}
CONTAINER = {"name": str, "image": str, "resources": {"limits": dict, "requests": dict}, "volumeMounts": list}
RAY_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "entrypoint": str,
        "shutdownAfterJobFinishes": bool,
        "backoffLimit": int,
        "rayClusterSpec": {"rayVersion": str, "headGroupSpec": GROUP, "workerGroupSpecs": [WORKERS]},
    },
}


def assert_fields(value, schema, where="kuberay.yaml"):
    if isinstance(schema, type):
        assert type(value) is schema, f"{where}: {value!r} is no {schema.__name__}"
    elif isinstance(schema, list):
        for i, one in enumerate(value):
            assert_fields(one, schema[0], f"{where}[{i}]")
    else:
        assert value.keys() == schema.keys(), f"{where}: {set(value) ^ set(schema)}"
        for name, one in schema.items():
            assert_fields(value[name], one, f"{where}.{name}")


def assert_ours(text: str) -> None:
    """Flags after `slime train`, and files of the repository."""
    known = set(known_options(build_parser(None)[0]))
    for words in re.findall(r"slime (?:train|doctor)((?:[^\n&|#]|\\\n)*)", text.replace("\\\n", " ")):
        assert not {word for word in re.findall(r"--[a-z-]+", words)} - known, words
    for path in re.findall(r"\b(?:recipes|launchers)/[\w/.]+\w", text):
        assert (ROOT / path).exists(), path
    for target in re.findall(r"^\s*make ([\w-]+)", text, re.MULTILINE):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text(), target


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.name)
def test_a_launcher_parses_and_names_what_there_is(path):
    text = path.read_text()
    assert_ours(text)
    if path.suffix == ".yaml":
        values = yaml.safe_load(text)
        scripts = [value for value in (values.get("setup"), values.get("run")) if value]
    else:
        scripts = [text]
    for script in scripts:
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stderr
    assert "save" in text and "load" in text, "a launcher says how a run goes on after it was ended"


def test_kuberay_is_a_ray_job_whose_pods_share_a_volume():
    job = yaml.safe_load((ROOT / "launchers/kuberay.yaml").read_text())
    assert_fields(job, RAY_JOB)
    assert job["apiVersion"] == "ray.io/v1"
    assert job["kind"] == "RayJob" and "runtimeEnvYAML" not in job["spec"], "the code is the image's"
    start = "sh -c 'cd /volume && exec slime train --config /slime/recipes/"
    assert job["spec"]["entrypoint"].startswith(start)
    assert DOCKERFILE.count("\nWORKDIR /slime\n") == 2 and "wget" in DOCKERFILE.partition(" AS cuda")[2]
    cluster = job["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in pods:
        spec = pod["template"]["spec"]
        assert_fields(spec["containers"], [CONTAINER])
        assert pod.get("minReplicas", 1) <= pod.get("replicas", 1) <= pod.get("maxReplicas", 1)
        assert all(type(value) is str for value in pod["rayStartParams"].values())
        mounted = {mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]} == {"work", "shm"}
        assert "/volume" in {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}


def test_the_images_copy_and_install_what_there_is():
    rocm = (ROOT / "Dockerfile.rocm").read_text()
    assert_ours(DOCKERFILE)
    assert re.findall(r"^FROM \S+ AS (\w+)", DOCKERFILE + rocm, re.MULTILINE) == ["cpu", "cuda", "rocm"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for found in re.findall(r'"\.\[([\w,]+)\]"', DOCKERFILE + rocm):
        assert set(found.split(",")) <= set(extras), found
    for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE + rocm, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split()), line
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*", "runs"} <= set(ignored)


def test_sglang_of_the_image_is_the_one_that_is_tested():
    version = re.search(r'"sglang==([\d.]+)"', DOCKERFILE)[1]
    assert f"sglang=={version}" in (ROOT / "Makefile").read_text()
