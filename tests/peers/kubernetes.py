#!/usr/bin/env python3
"""Validates the Kubernetes example against the published schemas.

    pip install kubernetes-validate
    curl -LO https://raw.githubusercontent.com/kubernetes-sigs/jobset/main/config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml
    python3 tests/peers/kubernetes.py examples/kubernetes/job.yaml --crd jobset.x-k8s.io_jobsets.yaml

Objects of Kubernetes are compared with its JSON schemas, which the package kubernetes-validate carries, and JobSets with the
definition of the custom resource; unknown fields are errors. Then the values that must fit each other are compared: the addresses
of the coordinators, the number of pods, the labels of the disruption budget, the names of volumes. Each check is made once more
on a damaged copy, which it must refuse. Exits with 1 and a sentence for each error.
"""

import argparse
import copy
import sys

import jsonschema
import kubernetes_validate
import yaml


def strict(schema):
    """The schema of a custom resource as a JSON schema that refuses unknown fields."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    result = {key: strict(value) for key, value in schema.items() if key != "properties" and not key.startswith("x-")}
    if "properties" in schema:
        result["properties"] = {name: strict(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            result.setdefault("additionalProperties", False)
    return result


def jobset_schema(path):
    with open(path) as file:
        crd = yaml.safe_load(file)
    schemas = {version["name"]: version["schema"]["openAPIV3Schema"] for version in crd["spec"]["versions"]}
    group = crd["spec"]["group"]
    result = {}
    for version, schema in schemas.items():
        # The API server checks the metadata itself.
        schema["properties"]["metadata"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        result[f"{group}/{version}"] = strict(schema)
    return result


def schema_errors(document, jobsets):
    name = f"{document.get('kind')} {document.get('metadata', {}).get('name')}"
    if document["apiVersion"] in jobsets:
        validator = jsonschema.Draft7Validator(jobsets[document["apiVersion"]])
        return [f"{name}: {'.'.join(map(str, e.path))}: {e.message}" for e in validator.iter_errors(document)]
    try:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{name}: {'.'.join(map(str, error.path))}: {error.message}"]
    return []


def contradictions(documents):
    """Values of one object that do not fit those of another."""
    by_kind = {document["kind"]: document for document in documents}
    jobset, claim = by_kind["JobSet"], by_kind["PersistentVolumeClaim"]["metadata"]["name"]
    jobs = {job["name"]: job for job in jobset["spec"]["replicatedJobs"]}
    name, subdomain = jobset["metadata"]["name"], jobset["spec"]["network"]["subdomain"]
    checks = {}
    for job in jobs.values():
        spec = job["template"]["spec"]
        pod = spec["template"]
        [container] = pod["spec"]["containers"]
        labels = pod["metadata"]["labels"].items()
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        claims = [volume["persistentVolumeClaim"]["claimName"] for volume in volumes.values() if "persistentVolumeClaim" in volume]
        [affinity] = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        rules = [rule["onExitCodes"]["containerName"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
        variables = {one["name"] for one in container["env"]}
        own = {
            "completions and parallelism agree": spec["completions"] == spec["parallelism"],
            "the job is indexed, so that pods have a name": spec["completionMode"] == "Indexed" and "INDEX" in variables,
            "one replica holds all pods": job["replicas"] == 1,
            "the anti-affinity selects the pods": affinity["labelSelector"]["matchLabels"].items() <= labels,
            "the claim of the shared volume exists": claims == [claim],
            "mounted volumes exist": {mount["name"] for mount in container["volumeMounts"]} == set(volumes),
            "the failure policy names the container": rules == [container["name"]],
            "failed pods are replaced, as a podFailurePolicy demands": pod["spec"]["restartPolicy"] == "Never",
        }
        checks.update({f"{job['name']}: {what}": holds for what, holds in own.items()})
    coordinators, nodes = (jobs[name]["template"]["spec"] for name in ["coordinators", "nodes"])
    [coordinator] = coordinators["template"]["spec"]["containers"]
    [port] = [port["containerPort"] for port in coordinator["ports"] if port["protocol"] == "UDP"]
    addresses = [f"{name}-coordinators-0-{i}.{subdomain}:{port}" for i in range(coordinators["completions"])]
    wanted = by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items()
    checks.update({
        "the coordinators advertise the addresses of their pods": f"--advertise {','.join(addresses)} " in coordinator["command"][-1],
        "they listen on that port": f"--listen 0.0.0.0:{port} " in coordinator["command"][-1],
        "the disruption budget selects the nodes": wanted <= nodes["template"]["metadata"]["labels"].items(),
        "the set succeeds with its nodes": jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == ["nodes"],
    })
    return [f"it is not true that {what}" for what, holds in checks.items() if not holds]


def errors(documents, jobsets):
    found = [error for document in documents for error in schema_errors(document, jobsets)]
    return found or contradictions(documents)


def damaged(documents):
    """Copies of the example with one mistake each."""
    def with_mistake(mistake):
        result = copy.deepcopy(documents)
        mistake({document["kind"]: document for document in result})
        return result

    def job(kinds):
        return kinds["JobSet"]["spec"]["replicatedJobs"][-1]["template"]["spec"]

    def container(kinds):
        return job(kinds)["template"]["spec"]["containers"][0]

    yield "an unknown field of a JobSet", with_mistake(lambda k: k["JobSet"]["spec"].update(replicas=3))
    yield "an unknown field of a pod", with_mistake(lambda k: container(k).update(comand=["x"]))
    yield "a wrong type in a pod", with_mistake(lambda k: job(k).update(completions="three"))
    yield "an unknown field of a budget", with_mistake(lambda k: k["PodDisruptionBudget"]["spec"].update(maxUnavailble=1))
    yield "an unknown field of a claim", with_mistake(lambda k: k["PersistentVolumeClaim"]["spec"].update(access=[]))
    yield "another number of pods", with_mistake(lambda k: job(k).update(completions=4))
    yield "another address", with_mistake(lambda k: k["JobSet"]["spec"]["network"].update(subdomain="elsewhere"))
    yield "other labels", with_mistake(lambda k: k["PodDisruptionBudget"]["spec"]["selector"].update(matchLabels={"a": "b"}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--crd", required=True, help="definition of the custom resource JobSet")
    args = parser.parse_args()
    with open(args.file) as file:
        documents = [document for document in yaml.safe_load_all(file) if document]
    jobsets = jobset_schema(args.crd)
    found = errors(documents, jobsets)
    found += [f"{what} is not refused" for what, copies in damaged(documents) if not found and not errors(copies, jobsets)]
    for error in found:
        print(f"{args.file}: {error}", file=sys.stderr)
    if found:
        return 1
    print(f"{args.file}: {len(documents)} objects are valid; every damaged copy is refused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
