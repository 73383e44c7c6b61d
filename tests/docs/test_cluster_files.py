"""cluster/ holds against Ray's and KubeRay's schemas, with unknown keys refused."""

from __future__ import annotations

import copy
import gzip
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import BaseModel

from ckn_scale.serving.settings import ServeSettings

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
CRDS = Path(__file__).parent / "kuberay_crds"
METADATA_KEYS = {"name", "namespace", "labels", "annotations"}


def load_manifests() -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all((CLUSTER / "kuberay" / "ckn-scale.yaml").read_text())
    return {document["kind"]: document for document in documents}


def load_crd(kind: str) -> dict[str, Any]:
    with gzip.open(CRDS / f"{kind.lower()}s.json.gz") as source:
        return json.load(source)


def close_schema(schema: Any) -> Any:
    """The schema with unknown keys refused wherever it names the known ones."""
    if isinstance(schema, list):
        return [close_schema(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: close_schema(value) for key, value in schema.items()}
    open_on_purpose = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and not open_on_purpose:
        closed["additionalProperties"] = False
    return closed


def check_manifest(document: dict[str, Any]) -> None:
    crd = load_crd(document["kind"])
    assert document["apiVersion"] == f"{crd['group']}/{crd['version']}"
    assert set(document["metadata"]) <= METADATA_KEYS
    jsonschema.Draft202012Validator(close_schema(crd["schema"])).validate(document)


def check_serve_config(config: dict[str, Any]) -> None:
    from ray.serve.schema import ServeDeploySchema

    parsed = ServeDeploySchema.model_validate(config)
    unknown = list(find_unknown_keys(config, parsed))
    assert not unknown, f"Ray Serve does not know {unknown}"
    for application in config["applications"]:
        ServeSettings(**application["args"])


def find_unknown_keys(config: Any, parsed: Any, where: str = "") -> Iterator[str]:
    """Keys that a pydantic model swallowed without having a field for them."""
    if isinstance(parsed, BaseModel):
        for key in set(config) - set(type(parsed).model_fields):
            yield f"{where}{key}"
        for key in set(config) & set(type(parsed).model_fields):
            yield from find_unknown_keys(config[key], getattr(parsed, key), f"{where}{key}.")
    elif isinstance(parsed, list):
        for position, (part, model) in enumerate(zip(config, parsed, strict=True)):
            yield from find_unknown_keys(part, model, f"{where}{position}.")


def walk_objects(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all mappings in a document."""
    if isinstance(node, dict):
        yield path
    for key, value in (
        node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    ):
        yield from walk_objects(value, (*path, key))


def pod_templates(manifests: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for spec in (manifests["RayCluster"]["spec"], manifests["RayService"]["spec"]["rayClusterConfig"]):
        yield "head", spec["headGroupSpec"]["template"]
        for group in spec["workerGroupSpecs"]:
            yield group["groupName"], group["template"]
    yield "submitter", manifests["RayJob"]["spec"]["submitterPodTemplate"]


@pytest.mark.parametrize("kind", ["RayCluster", "RayJob", "RayService"])
def test_manifests_hold_against_kuberays_schemas(kind):
    check_manifest(load_manifests()[kind])


@pytest.mark.parametrize("kind", ["RayCluster", "RayJob", "RayService"])
def test_a_misspelt_key_anywhere_in_a_manifest_is_refused(kind):
    document = load_manifests()[kind]
    free = {"rayStartParams", "annotations", "metadata", "clusterSelector", "requests", "limits"}
    schema = jsonschema.Draft202012Validator(close_schema(load_crd(kind)["schema"]))
    for path in walk_objects(document):
        if path and path[-1] in free:
            continue  # maps of the user's own keys
        broken = copy.deepcopy(document)
        node = broken
        for key in path:
            node = node[key]
        node["mispelt"] = 1
        assert not schema.is_valid(broken), f"a misspelt key in {path} passes"


def test_the_serve_configs_hold_and_are_the_same():
    config = yaml.safe_load((CLUSTER / "serve.yaml").read_text())
    check_serve_config(config)
    assert yaml.safe_load(load_manifests()["RayService"]["spec"]["serveConfigV2"]) == config


@pytest.mark.parametrize(
    "path", [("proxy_locationn",), ("http_options", "prot"), ("applications", 0, "import_pth")]
)
def test_a_misspelt_key_in_a_serve_config_is_refused(path):
    config = yaml.safe_load((CLUSTER / "serve.yaml").read_text())
    node = config
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = 1
    with pytest.raises(AssertionError, match=f"does not know .*{path[-1]}"):
        check_serve_config(config)


def test_the_serve_config_builds_the_application(monkeypatch):
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    from ckn_scale.serving.app import build_app

    config = yaml.safe_load((CLUSTER / "serve.yaml").read_text())["applications"][0]
    assert config["import_path"] == f"{build_app.__module__}:{build_app.__name__}"
    monkeypatch.setenv("CKN_SCALE_API_KEYS", "one,two")
    application = call_user_app_builder_with_args_if_necessary(build_app, config["args"])
    assert application._bound_deployment.name == "ingress"
    settings, encoder, *groups = application._bound_deployment.init_args
    assert len(settings.keys) == 2
    assert encoder._bound_deployment.ray_actor_options["num_gpus"] == 1
    names = [group._bound_deployment.name for group in groups]
    assert names == [deployment["name"] for deployment in config["deployments"]]


def test_the_image_sets_up_serves_proxy_as_serve_run_does():
    from ckn_scale.serving import proxy

    ((name, path),) = proxy.ENVIRONMENT.items()
    assert f"{name}={path}\n" in (CLUSTER / "Dockerfile").read_text()
    module, _, function = path.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_file_for_virtual_machines_holds_against_rays_schema():
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((CLUSTER / "aws.yaml").read_text())
    validate_config(prepare_config(copy.deepcopy(config)))
    config["available_node_types"]["gpu_worker"]["min_worker"] = 1
    with pytest.raises(jsonschema.ValidationError):
        validate_config(prepare_config(config))


def test_every_file_names_the_tested_ray_and_one_image():
    release = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    manifests = load_manifests()
    assert manifests["RayCluster"]["spec"]["rayVersion"] == release
    assert manifests["RayService"]["spec"]["rayClusterConfig"]["rayVersion"] == release
    for text in ((CLUSTER / "Dockerfile").read_text(), (CLUSTER / "README.md").read_text()):
        assert set(re.findall(r"rayproject/ray:([\d.]+)-", text)) == {release}
    images = {pod["spec"]["containers"][0]["image"] for _, pod in pod_templates(manifests)}
    assert images == {yaml.safe_load((CLUSTER / "aws.yaml").read_text())["docker"]["image"]}


def test_pods_reserve_the_memory_they_may_use_and_workers_hold_no_account_token():
    pods = list(pod_templates(load_manifests()))
    assert {"head"} < {name for name, _ in pods}
    for name, pod in pods:
        resources = pod["spec"]["containers"][0]["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"], name
        if name != "head":  # the autoscaler beside the head speaks to Kubernetes
            assert pod["spec"]["automountServiceAccountToken"] is False, name


def test_clusters_ask_for_rays_token_and_heads_take_no_work():
    manifests = load_manifests()
    for spec in (manifests["RayCluster"]["spec"], manifests["RayService"]["spec"]["rayClusterConfig"]):
        assert spec["authOptions"] == {"mode": "token"}
        assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_the_job_is_a_command_that_the_command_line_knows():
    from typer.main import get_command

    from ckn_scale.cli.main import app

    words = load_manifests()["RayJob"]["spec"]["entrypoint"].split()
    assert words[0] == "ckn-scale"
    command = get_command(app).commands[words[1]]
    parsed = command.make_context(words[1], words[2:]).params
    assert (parsed["ray"], parsed["run"]) == ("auto", "s3://my-bucket/my-run")


def test_files_that_the_readme_and_dockerfile_name_are_there():
    readme = (CLUSTER / "README.md").read_text()
    named = re.findall(r"(?:cluster|jobs|tests)/[\w./-]+\.(?:yaml|py)|cluster/Dockerfile", readme)
    copied = re.findall(r"^COPY \S+ (.+) \S+$", (CLUSTER / "Dockerfile").read_text(), re.MULTILINE)
    assert named
    assert copied
    for path in {*named, *" ".join(copied).split()}:
        assert (ROOT / path).exists(), path
