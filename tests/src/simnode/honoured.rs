//! Which fields of a pod's spec the simulated node honours.
//!
//! A test that installs a manifest proves nothing about a field that the testbed silently skips. So every
//! field must be in one of two tables: [`HONOURED`], or [`IGNORED`] with the reason why the outcome of a
//! test cannot depend on it. Anything else is an error that names the field.
//!
//! Works on the raw object of the API server, not on typed structs, which would drop what they do not know.

use forewarm_signals::resource::GPU;
use serde_json::Value;

/// Fields (with everything below them) that the node carries out.
const HONOURED: &[&str] = &[
    "nodeName",
    "hostNetwork",
    "restartPolicy",
    "runtimeClassName",
    "terminationGracePeriodSeconds",
    "serviceAccountName",
    "serviceAccount",
    "automountServiceAccountToken", // the API server adds the projected volume
    "volumes[].name",
    "volumes[].emptyDir",
    "volumes[].hostPath.path",
    "volumes[].hostPath.type",
    "volumes[].configMap.name",
    "volumes[].configMap.optional",
    "volumes[].configMap.defaultMode",
    "volumes[].configMap.items",
    "volumes[].secret.secretName",
    "volumes[].secret.optional",
    "volumes[].secret.defaultMode",
    "volumes[].secret.items",
    "volumes[].downwardAPI.defaultMode",
    "volumes[].downwardAPI.items[].path",
    "volumes[].downwardAPI.items[].fieldRef",
    "volumes[].projected.defaultMode",
    "volumes[].projected.sources[].serviceAccountToken",
    "volumes[].projected.sources[].configMap",
    "volumes[].projected.sources[].secret",
    "volumes[].projected.sources[].downwardAPI.items[].path",
    "volumes[].projected.sources[].downwardAPI.items[].fieldRef",
    "containers[].name",
    "containers[].image",
    "containers[].command",
    "containers[].args",
    "containers[].workingDir",
    "containers[].env[].name",
    "containers[].env[].value",
    "containers[].env[].valueFrom.fieldRef",
    "containers[].env[].valueFrom.configMapKeyRef",
    "containers[].env[].valueFrom.secretKeyRef",
    "containers[].envFrom[].prefix",
    "containers[].envFrom[].configMapRef",
    "containers[].envFrom[].secretRef",
    "containers[].volumeMounts[].name",
    "containers[].volumeMounts[].mountPath",
    "containers[].volumeMounts[].readOnly",
    "containers[].ports",
    "containers[].terminationMessagePath",
    "containers[].terminationMessagePolicy",
    "containers[].resources.limits.nvidia.com/gpu",
    "containers[].resources.requests.nvidia.com/gpu",
    "containers[].securityContext.readOnlyRootFilesystem",
];

/// What a probe may say; applies to the three kinds alike.
const HONOURED_OF_PROBES: &[&str] = &[
    "httpGet.path",
    "httpGet.port",
    "httpGet.scheme",
    "initialDelaySeconds",
    "periodSeconds",
    "timeoutSeconds",
    "successThreshold",
    "failureThreshold",
];

/// Fields skipped knowingly.
const IGNORED: &[(&str, &str)] = &[
    ("schedulerName", "the real scheduler has done its work"),
    ("affinity", "the real scheduler has done its work"),
    ("nodeSelector", "the real scheduler has done its work"),
    (
        "topologySpreadConstraints",
        "the real scheduler has done its work",
    ),
    ("tolerations", "the real scheduler and taint controller do this"),
    ("priority", "the real scheduler and admission do this"),
    ("priorityClassName", "the real scheduler and admission do this"),
    ("preemptionPolicy", "the real scheduler does this"),
    (
        "dnsPolicy",
        "there is no DNS in the testbed; nothing under test may need it",
    ),
    ("hostPID", "all simulated containers see all pids of the testbed"),
    (
        "shareProcessNamespace",
        "all simulated containers see all pids of the testbed",
    ),
    (
        "enableServiceLinks",
        "only KUBERNETES_SERVICE_* are set; nothing under test may read others",
    ),
    ("securityContext", "users, groups and seccomp are not simulated"),
    ("imagePullSecrets", "nothing is pulled"),
    ("hostname", "used for the host name only"),
    ("containers[].imagePullPolicy", "nothing is pulled"),
    (
        "containers[].resources.limits.cpu",
        "no cgroups; budgets are the benches' work",
    ),
    (
        "containers[].resources.limits.memory",
        "no cgroups; budgets are the benches' work",
    ),
    ("containers[].resources.limits.ephemeral-storage", "no cgroups"),
    (
        "containers[].resources.requests.cpu",
        "the real scheduler has done its work",
    ),
    (
        "containers[].resources.requests.memory",
        "the real scheduler has done its work",
    ),
    (
        "containers[].resources.requests.ephemeral-storage",
        "the real scheduler has done its work",
    ),
    (
        "containers[].securityContext.allowPrivilegeEscalation",
        "privileges are not simulated",
    ),
    (
        "containers[].securityContext.capabilities",
        "privileges are not simulated",
    ),
    (
        "containers[].securityContext.privileged",
        "privileges are not simulated",
    ),
    (
        "containers[].securityContext.seccompProfile",
        "seccomp is not simulated",
    ),
    (
        "containers[].securityContext.runAsUser",
        "users are not simulated",
    ),
    (
        "containers[].securityContext.runAsGroup",
        "users are not simulated",
    ),
    (
        "containers[].securityContext.runAsNonRoot",
        "users are not simulated",
    ),
];

/// A pod asks for something that the simulated node cannot do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the simulated node cannot honour spec.{0}: teach it (tests/src/simnode), or list it with a reason")]
pub struct NotHonoured(pub String);

/// Checks a pod's raw `spec`.
///
/// # Errors
/// The first field that no table lists.
pub fn check(spec: &Value) -> Result<(), NotHonoured> {
    walk(spec, String::new(), "")
}

fn walk(value: &Value, path: String, pattern: &str) -> Result<(), NotHonoured> {
    // The kubelet hands the devices of an init container on to the containers; this node does not.
    if path.starts_with("initContainers") && pattern.ends_with(GPU) {
        return Err(NotHonoured(path));
    }
    // Init containers are containers in every other respect that matters here.
    let pattern = pattern.replacen("initContainers", "containers", 1);
    if is_listed(&pattern) || value.is_null() {
        return Ok(());
    }
    match value {
        Value::Object(fields) if !fields.is_empty() => fields.iter().try_for_each(|(name, below)| {
            let dot = if path.is_empty() { "" } else { "." };
            walk(
                below,
                format!("{path}{dot}{name}"),
                &format!("{pattern}{dot}{name}"),
            )
        }),
        Value::Array(items) => items
            .iter()
            .enumerate()
            .try_for_each(|(index, below)| walk(below, format!("{path}[{index}]"), &format!("{pattern}[]"))),
        // An empty object says nothing (`resources: {}`), unless its presence is the message (`emptyDir: {}`),
        // and those are listed.
        Value::Object(_) if path.is_empty() || is_parent(&pattern) => Ok(()),
        _ => Err(NotHonoured(path)),
    }
}

fn is_listed(pattern: &str) -> bool {
    HONOURED.contains(&pattern)
        || IGNORED.iter().any(|(ignored, _)| *ignored == pattern)
        || probe_field(pattern).is_some_and(|field| HONOURED_OF_PROBES.contains(&field))
}

fn is_parent(pattern: &str) -> bool {
    let below = |listed: &str| {
        listed
            .strip_prefix(pattern)
            .is_some_and(|rest| rest.starts_with(['.', '[']))
    };
    HONOURED.iter().any(|listed| below(listed)) || IGNORED.iter().any(|(listed, _)| below(listed))
}

fn probe_field(pattern: &str) -> Option<&str> {
    ["livenessProbe.", "readinessProbe.", "startupProbe."]
        .into_iter()
        .find_map(|probe| pattern.strip_prefix("containers[].")?.strip_prefix(probe))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_the_node_does_or_knowingly_skips_passes() {
        let spec = json!({
            "containers": [{
                "name": "c", "image": "i", "resources": {}, "securityContext": {"privileged": true},
                "readinessProbe": {"httpGet": {"path": "/readyz", "port": "admin"}, "periodSeconds": 2},
                "env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            }],
            "initContainers": [{"name": "i", "image": "i", "args": ["x"]}],
            "volumes": [{"name": "e", "emptyDir": {}}],
            "affinity": {"anything": {"at": ["all"]}},
        });
        assert_eq!(check(&spec), Ok(()));
    }

    #[test]
    fn anything_else_is_named_with_its_place() {
        for (spec, named) in [
            (
                json!({"containers": [{"name": "c"}, {"lifecycle": {"preStop": {}}}]}),
                "containers[1].lifecycle.preStop",
            ),
            (
                json!({"initContainers": [{"name": "i", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}),
                "initContainers[0].resources.limits.nvidia.com/gpu",
            ),
            (
                json!({"volumes": [{"name": "v", "nfs": {"server": "s"}}]}),
                "volumes[0].nfs.server",
            ),
            (
                json!({"containers": [{"livenessProbe": {"exec": {"command": ["a"]}}}]}),
                "containers[0].livenessProbe.exec.command[0]",
            ),
            (
                json!({"containers": [{"volumeMounts": [{"subPath": "x"}]}]}),
                "containers[0].volumeMounts[0].subPath",
            ),
            (json!({"inventedInNextRelease": true}), "inventedInNextRelease"),
        ] {
            assert_eq!(check(&spec), Err(NotHonoured(named.to_owned())));
        }
    }
}
