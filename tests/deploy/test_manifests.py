"""What deploy/ holds fits together and fits the code: names, keys, volumes, metrics. tests/deploy/compose.py runs it for real."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.controller.broker_setup import folder as setup
from services.sinks.prometheus import described
from shared.metric_names import DECLARED
from shared.permissions import ROLES

DEPLOY = Path(__file__).parents[2] / "deploy"
SERVICES = ("controller", "dcs", "reward", "rollout", "trainer")
KUBERNETES = DEPLOY / "kubernetes"
OPTIONAL = {"teacher.yaml", "reference.yaml"}
"""What only some run files need: named in the kustomization as a comment."""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


@pytest.mark.parametrize("service", SERVICES)
def test_each_image_holds_its_service_alone(service: str) -> None:
    text = (DEPLOY / "images" / f"{service}.Dockerfile").read_text()
    extras = {extra for group in re.findall(r"'\.\[([a-z,]+)\]'", text) for extra in group.split(",")}
    assert service in extras
    assert not extras & (set(SERVICES) - {service})
    assert "USER 10001:10001" in text
    assert "HEALTHCHECK" in text
    assert f'ENTRYPOINT ["slipstream", "serve", "{service}"]' in text
    assert "FROM ${BASE}" in text
    for beyond in ("# syntax=", "--link", "<<"):  # an old engine, or one without a registry, has none of these
        assert beyond not in text


def test_a_container_sees_the_key_of_its_role_alone(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        keys = [volume for volume in service.get("volumes", []) if str(volume).startswith("key-")]
        if name == "setup":
            roles = {key.partition(":")[0].removeprefix("key-") for key in keys}
            assert roles == set(ROLES)
            assert all(key.endswith(f"/clients/{key.partition(':')[0].removeprefix('key-')}") for key in keys)
        elif keys:
            other = {"submit": "operator", "cli": "operator", "metrics": "observer", "prometheus": "observer"}
            other |= {"teacher": "stage", "reference": "stage"}
            assert keys == [f"key-{other.get(name, name)}:/run/slipstream:ro"], name


def test_volumes_are_declared_and_used(compose: dict[str, Any]) -> None:
    used = {
        str(volume).partition(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", [])
        if isinstance(volume, str) and not volume.startswith(".")
    }
    assert used == set(compose["volumes"])


def test_nothing_is_published_beyond_loopback(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    known = {described(service, one.name)[0] for one in DECLARED for service in one.services}
    known |= {described(service, "step")[0] for service in SERVICES}
    known |= {"slipstream_replicas", "slipstream_queue_messages"}
    dashboard = json.loads((DEPLOY / "monitoring" / "grafana" / "dashboards" / "slipstream.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for expression in asked for name in re.findall(r"\b(slipstream_\w+)\{", expression)}
    assert names
    assert names <= known, names - known


def test_the_cluster_takes_what_broker_init_makes(tmp_path: Path) -> None:
    nodes = [f"broker-{number}.broker" for number in range(3)]
    setup.write(tmp_path / "secrets", setup.extend(setup.Plan(), ["my-run"], nodes, ["broker"]))
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    generated = {entry["name"]: entry["files"] for entry in kustomization["secretGenerator"]}
    for files in generated.values():
        for file in files:
            assert (tmp_path / file.rpartition("=")[2]).is_file(), file
    assert {name.removeprefix("key-") for name in generated if name != "nodes"} == set(ROLES) - {"observer"}
    mounted = set()
    for name in {*kustomization["resources"], *OPTIONAL}:
        for document in documents(name):
            template = document.get("spec", {}).get("template", {}).get("spec", {})
            mounted |= {volume["secret"]["secretName"] for volume in template.get("volumes", []) if "secret" in volume}
            for container in template.get("containers", []):
                volumes = {volume["name"] for volume in template.get("volumes", [])} | {"data"}
                assert {mount["name"] for mount in container["volumeMounts"]} <= volumes, document["metadata"]["name"]
    assert mounted == set(generated)


def test_each_file_of_the_cluster_is_taken_or_offered() -> None:
    text = (KUBERNETES / "kustomization.yaml").read_text()
    taken = set(yaml.safe_load(text)["resources"])
    offered = set(re.findall(r"^  # - (\w+\.yaml)", text, re.MULTILINE))
    assert offered == OPTIONAL
    assert taken | offered == {file.name for file in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}


@pytest.mark.parametrize("stage", ["teacher", "reference"])
def test_a_stage_of_the_cluster_is_that_of_compose(stage: str, compose: dict[str, Any]) -> None:
    beside = compose["services"][stage]
    assert beside["profiles"] == [stage]
    (deployment,) = documents(f"{stage}.yaml")
    assert deployment["metadata"]["name"] == deployment["spec"]["selector"]["matchLabels"]["app"] == stage
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (container["image"], container["command"]) == (beside["image"], beside["entrypoint"])
    mounts = {mount["name"]: (mount["mountPath"], mount.get("readOnly", False)) for mount in container["volumeMounts"]}
    assert mounts["runs"] == ("/slipstream/runs", True)
    assert "trainer:/slipstream/runs:ro" in beside["volumes"]
    claims = {volume["name"]: volume.get("persistentVolumeClaim") for volume in pod["volumes"]}
    assert claims["runs"] == {"claimName": "trainer"}
    (rollout,) = (one for one in documents("services.yaml") if one["metadata"]["name"] == "rollout" and "spec" in one)
    alike = rollout["spec"]["template"]["spec"]["containers"][0]
    for what in ("envFrom", "livenessProbe", "startupProbe", "securityContext", "resources"):
        assert container[what] == alike[what], what
