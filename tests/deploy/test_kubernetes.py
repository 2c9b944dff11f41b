"""What would be applied to a cluster: rendered, and checked against the real schemas.

No cluster runs here: that pods start and probes answer is not shown by these tests.
"""

import json

import pytest

from tests.deploy.tools import (
    CHARTS,
    DEPLOY,
    in_tools_venv,
    node_modules,
    objects,
    only,
    render,
    run,
    tool,
)

OPTIONS = {
    "lighthouse": [
        (),
        ("--set", "tls.mutual=true,tokens.secretName=tokens,replicas=2"),
        ("--set", "tls.enabled=false,networkPolicy.enabled=false,serviceMonitor.enabled=false"),
        ("--set", "onlyLeaderReady=true"),
        ("--set", "image.digest=sha256:" + "0" * 64 + ",priorityClassName=high,replicas=1"),
    ],
    "training-job": [
        (),
        ("--set", "groups=3,pods=4,tls.clientSecretName=c,token.secretName=t"),
        ("--set", "checkpoint.enabled=false,tls.enabled=false,queueName=q"),
        ("--set", "checkpoint.claimName=claim,exclusiveTopology=rack,priorityClassName=high"),
    ],
}
CASES = [(chart, options) for chart, several in OPTIONS.items() for options in several]
JOBSET = """
import json, sys
from kubeflow_trainer_api import models
given = json.load(sys.stdin)
model = models.JobsetV1alpha2JobSet.from_dict(given)
def compare(given, read, path):
    if isinstance(given, dict):
        for name in given:
            assert name in read, f"{path}.{name} is no field of a JobSet"
            compare(given[name], read[name], f"{path}.{name}")
    elif isinstance(given, list):
        for i, (a, b) in enumerate(zip(given, read, strict=True)):
            compare(a, b, f"{path}[{i}]")
compare(given, json.loads(model.to_json()), "jobset")
"""


@pytest.mark.parametrize("chart", CHARTS)
def test_helm_finds_nothing_to_complain_about(chart):
    run(tool("helm"), "lint", "--strict", DEPLOY / "helm" / chart)


@pytest.mark.parametrize(("chart", "options"), CASES)
def test_every_object_fits_the_schema_of_kubernetes(chart, options):
    done = run(
        tool("kubernetes-validate"), "--strict", "-", stdin=render(chart, *options), check=False
    )
    assert done.returncode == 0, done.stdout
    unknown = [line for line in done.stdout.splitlines() if "Couldn't find schema" in line]
    kinds = {line.partition("for kind ")[2].partition(" with")[0] for line in unknown}
    assert kinds <= {"JobSet", "ServiceMonitor", "PodMonitor"}  # those have tests of their own


def test_only_the_leader_can_be_made_ready_for_managers():
    made = objects(render("lighthouse", "--set", "onlyLeaderReady=true"))
    (container,) = only("StatefulSet", made)["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/leaderz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert not [o for o in made if o["kind"] == "PodDisruptionBudget"]


def test_a_field_that_kubernetes_does_not_know_is_noticed():
    wrong = render("lighthouse").replace("podManagementPolicy", "podManagementPolitics")
    done = run(tool("kubernetes-validate"), "--strict", "-", stdin=wrong, check=False)
    assert done.returncode != 0


@pytest.mark.parametrize("options", OPTIONS["training-job"])
def test_the_job_fits_the_schema_of_jobset(options):
    jobset = only("JobSet", objects(render("training-job", *options)))
    done = in_tools_venv(JOBSET, json.dumps(jobset))
    assert done.returncode == 0, done.stderr
    for job in jobset["spec"]["replicatedJobs"]:
        validate_as_job(job["template"]["spec"])


def validate_as_job(spec):
    """JobSet's own schema leaves pods open; as a Job the template is checked to the last field."""
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": spec}
    run(tool("kubernetes-validate"), "--strict", "-", stdin=json.dumps(job))


@pytest.mark.parametrize(
    "wrong", [{"failurePolicy": {"maxRestart": 3}}, {"network": {"dns": True}}]
)
def test_a_field_that_jobset_does_not_know_is_noticed(wrong):
    jobset = only("JobSet", objects(render("training-job")))
    jobset["spec"].update(wrong)
    done = in_tools_venv(JOBSET, json.dumps(jobset))
    assert "is no field of a JobSet" in done.stderr


def monitors_are_valid(folder, found):
    """Compile them as literals of the operator's types: an unknown field is an error."""
    kinds = ("ServiceMonitor", "PodMonitor")
    package = "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1"
    lines = [f'import type {{ I{kind} }} from "{package}/{kind}";' for kind in kinds]
    for i, one in enumerate(o for o in found if o["kind"] in kinds):
        lines.append(f"export const m{i}: I{one['kind']} = {json.dumps(one)};")
    assert len(lines) > len(kinds)
    file = folder / "monitors.ts"
    file.write_text("\n".join(lines))
    (folder / "node_modules").symlink_to(node_modules() / "node_modules")
    flags = ["--noEmit", "--skipLibCheck", "--strict", "--module", "esnext"]
    return run(tool("tsc"), *flags, "--moduleResolution", "bundler", file, check=False)


def test_the_monitors_fit_the_schema_of_the_prometheus_operator(tmp_path):
    mutual = render("lighthouse", "--set", "tls.mutual=true")
    found = objects(render("lighthouse")) + objects(mutual) + objects(render("training-job"))
    done = monitors_are_valid(tmp_path, found)
    assert done.returncode == 0, done.stdout


def test_a_field_that_the_prometheus_operator_does_not_know_is_noticed(tmp_path):
    monitor = only("ServiceMonitor", objects(render("lighthouse")))
    monitor["spec"]["endpoints"][0]["intervals"] = "15s"
    assert "intervals" in monitors_are_valid(tmp_path, [monitor]).stdout


@pytest.mark.parametrize(
    ("chart", "setting"),
    [
        ("lighthouse", "replicas=zero"),
        ("lighthouse", "replica=3"),
        ("lighthouse", "lease.ttlSeconds=0"),
        ("training-job", "lighthouse=nowhere"),
        ("training-job", "sharedMemory=64GB"),
        ("training-job", "runAsUser=0"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_is_applied(chart, setting):
    command = [tool("helm"), "template", "x", DEPLOY / "helm" / chart, "--set", setting]
    assert "schema" in run(*command, check=False).stderr


@pytest.mark.parametrize(("chart", "options"), CASES)
def test_every_container_runs_without_rights(chart, options):
    found = objects(render(chart, *options))
    if chart == "lighthouse":
        specs = [only("StatefulSet", found)["spec"]["template"]["spec"]]
    else:
        groups = only("JobSet", found)["spec"]["replicatedJobs"]
        specs = [g["template"]["spec"]["template"]["spec"] for g in groups]
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]


def test_the_lighthouse_may_touch_its_lease_and_nothing_else():
    found = objects(render("lighthouse"))
    named, creating = only("Role", found)["rules"]
    assert named["resources"] == creating["resources"] == ["leases"]
    assert named["resourceNames"] == ["lighthouse"] and creating["verbs"] == ["create"]
    assert not [o for o in found if o["kind"].startswith("ClusterRole")]


def test_its_rights_are_those_that_the_lease_uses():
    """The verbs of the role against the calls in lighthouse/lease/kubernetes_api.py."""
    named, _ = only("Role", objects(render("lighthouse")))["rules"]
    source = (DEPLOY.parent / "lighthouse/lease/kubernetes_api.py").read_text()
    used = {
        verb
        for verb, call in {"get": '"GET"', "patch": '"PATCH"', "watch": '"watch"'}.items()
        if call in source
    }
    assert set(named["verbs"]) == used and '"POST"' in source and '"DELETE"' not in source


def test_a_group_that_fails_is_recreated_alone():
    spec = only("JobSet", objects(render("training-job", "--set", "groups=3")))["spec"]
    assert [j["name"] for j in spec["replicatedJobs"]] == ["group-0", "group-1", "group-2"]
    assert [r["action"] for r in spec["failurePolicy"]["rules"]] == [
        "RestartJobAndIgnoreMaxRestarts",
        "RestartJob",
    ]
    assert {j["template"]["spec"]["backoffLimit"] for j in spec["replicatedJobs"]} == {0}


def test_each_group_has_its_own_name_and_all_know_the_lighthouse():
    spec = only("JobSet", objects(render("training-job")))["spec"]
    trainers = [
        j["template"]["spec"]["template"]["spec"]["containers"][0] for j in spec["replicatedJobs"]
    ]
    env = [{e["name"]: e.get("value") for e in t["env"]} for t in trainers]
    assert [e["FTCORE_REPLICA_ID"] for e in env] == ["group-0", "group-1", "group-2", "group-3"]
    assert len({(e["FTCORE_LIGHTHOUSE"], e["FTCORE_JOB"]) for e in env}) == 1


def test_the_addresses_of_job_and_lighthouse_meet():
    found = objects(render("lighthouse"))
    workload, service = only("StatefulSet", found), only("Service", found)
    port = service["spec"]["ports"][0]["port"]
    names = [f"{workload['metadata']['name']}-{i}" for i in range(workload["spec"]["replicas"])]
    expected = [f"{n}.{workload['spec']['serviceName']}.ftcore.svc:{port}" for n in names]
    values = objects((DEPLOY / "helm/training-job/values.yaml").read_text())[0]
    assert values["lighthouse"].split(",") == expected


def test_the_plain_manifests_are_what_the_charts_give(tmp_path):
    run("env", f"HELM={tool('helm')}", "sh", DEPLOY / "kubernetes/render.sh", tmp_path)
    for path in sorted(tmp_path.rglob("*.yaml")):
        committed = DEPLOY / "kubernetes" / path.relative_to(tmp_path)
        assert path.read_text() == committed.read_text(), f"run deploy/kubernetes/render.sh: {path}"


@pytest.mark.parametrize("name", ["lighthouse", "prometheus-operator", "training-job"])
def test_kustomize_builds_them(name):
    built = run(tool("kubectl"), "kustomize", DEPLOY / "kubernetes" / name).stdout
    run(tool("kubernetes-validate"), "--strict", "-", stdin=built)
    assert {o["metadata"]["namespace"] for o in objects(built)} == {
        "train" if name == "training-job" else "ftcore"
    }
