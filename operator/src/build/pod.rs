//! What all our pods have in common: identity in the environment, a locked-down container, probes, spreading.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::core::v1::{
    Capabilities, Container, ContainerPort, EnvVar, EnvVarSource, HTTPGetAction, LocalObjectReference,
    ObjectFieldSelector, PodSecurityContext, PodSpec, Probe, SeccompProfile, SecurityContext, TopologySpreadConstraint,
};
use k8s_openapi::api::rbac::v1::{PolicyRule, Role, RoleBinding, RoleRef, Subject};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, OwnerReference};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::Part;
use crate::config::Settings;
use crate::validate::ValidDeployment;

/// Environment that every container running our code gets, and the pod field it comes from.
pub const POD_ENVIRONMENT: [(&str, &str); 4] = [
    ("POD_NAME", "metadata.name"),
    ("POD_UID", "metadata.uid"),
    ("POD_NAMESPACE", "metadata.namespace"),
    ("POD_IP", "status.podIP"),
];

/// User and group of our processes; the image runs as this user too.
const USER: i64 = 65532;

/// The environment of a container: ours, and the author's, which wins where both name a variable.
pub(super) fn environment(more: &[EnvVar]) -> Vec<EnvVar> {
    let mut variables: Vec<EnvVar> = POD_ENVIRONMENT
        .iter()
        .map(|(name, path)| EnvVar {
            name: (*name).into(),
            value_from: Some(EnvVarSource {
                field_ref: Some(ObjectFieldSelector { field_path: (*path).into(), api_version: Some("v1".into()) }),
                ..Default::default()
            }),
            ..Default::default()
        })
        .collect();
    variables.push(EnvVar {
        name: "DYN_DISCOVERY_BACKEND".into(),
        value: Some("kubernetes".into()),
        ..Default::default()
    });
    override_with(&mut variables, more);
    variables
}

/// Adds `more`, which replace those of the same name: server-side apply treats the list as a map.
pub(super) fn override_with(variables: &mut Vec<EnvVar>, more: &[EnvVar]) {
    for variable in more {
        variables.retain(|known| known.name != variable.name);
        variables.push(variable.clone());
    }
}

/// A container of ours, complete but for resources and mounts.
pub(super) fn container(
    name: &str,
    image: &str,
    pull_policy: &str,
    args: Vec<String>,
    env: &[EnvVar],
    ports: &[(&str, i32)],
) -> Container {
    Container {
        name: name.into(),
        image: Some(image.into()),
        image_pull_policy: Some(pull_policy.into()),
        args: Some(args),
        env: Some(environment(env)),
        ports: Some(
            ports
                .iter()
                .map(|(name, port)| ContainerPort {
                    name: Some((*name).into()),
                    container_port: *port,
                    protocol: Some("TCP".into()),
                    ..Default::default()
                })
                .collect(),
        ),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            read_only_root_filesystem: Some(true),
            capabilities: Some(Capabilities { drop: Some(vec!["ALL".into()]), add: None }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// Liveness on `/live` and readiness on `/ready` at the port of this name. A busy process gets a minute before it is killed.
pub(super) fn probes(container: &mut Container, port: &str) {
    let probe = |path: &str, period_s, failures| Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.into()),
            port: IntOrString::String(port.into()),
            ..Default::default()
        }),
        period_seconds: Some(period_s),
        timeout_seconds: Some(5),
        failure_threshold: Some(failures),
        ..Default::default()
    };
    container.liveness_probe = Some(probe("/live", 10, 6));
    container.readiness_probe = Some(probe("/ready", 2, 2));
}

/// A pod around `container`: non-root, spread over nodes where possible.
pub(super) fn pod(
    part: &Part<'_>,
    settings: &Settings,
    service_account: String,
    container: Container,
    grace_s: i64,
) -> PodSpec {
    let secrets = settings.image_pull_secrets.iter().map(|name| LocalObjectReference { name: name.clone() });
    PodSpec {
        image_pull_secrets: (secrets.len() > 0).then(|| secrets.collect()),
        service_account_name: Some(service_account),
        containers: vec![container],
        termination_grace_period_seconds: Some(grace_s),
        security_context: Some(PodSecurityContext {
            run_as_non_root: Some(true),
            run_as_user: Some(USER),
            run_as_group: Some(USER),
            fs_group: Some(USER),
            seccomp_profile: Some(SeccompProfile { type_: "RuntimeDefault".into(), ..Default::default() }),
            ..Default::default()
        }),
        topology_spread_constraints: Some(vec![TopologySpreadConstraint {
            max_skew: 1,
            topology_key: "kubernetes.io/hostname".into(),
            when_unsatisfiable: "ScheduleAnyway".into(),
            label_selector: Some(LabelSelector { match_labels: Some(part.selector()), ..Default::default() }),
            ..Default::default()
        }]),
        ..Default::default()
    }
}

/// An identity and what it may do.
pub(super) struct Access {
    pub(super) account: ServiceAccount,
    pub(super) role: Role,
    pub(super) binding: RoleBinding,
}

/// A ServiceAccount with `rules` in its own namespace.
pub(super) fn access(
    deployment: &ValidDeployment<'_>,
    part: &Part<'_>,
    name: &str,
    rules: Vec<PolicyRule>,
    owner: &OwnerReference,
) -> Access {
    let meta = part.meta(name.into(), &deployment.namespace, owner);
    Access {
        account: ServiceAccount { metadata: meta.clone(), ..Default::default() },
        role: Role { metadata: meta.clone(), rules: Some(rules) },
        binding: RoleBinding {
            metadata: meta,
            role_ref: RoleRef { api_group: "rbac.authorization.k8s.io".into(), kind: "Role".into(), name: name.into() },
            subjects: Some(vec![Subject {
                kind: "ServiceAccount".into(),
                name: name.into(),
                namespace: Some(deployment.namespace.clone()),
                api_group: None,
            }]),
        },
    }
}

/// One rule.
pub(super) fn rule(group: &str, resources: &[&str], verbs: &[&str]) -> PolicyRule {
    let owned = |items: &[&str]| items.iter().map(|item| item.to_string()).collect::<Vec<_>>();
    PolicyRule {
        api_groups: Some(vec![group.into()]),
        resources: Some(owned(resources)),
        verbs: owned(verbs),
        ..Default::default()
    }
}

/// `map`, or nothing where it is empty.
pub(super) fn non_empty(map: &BTreeMap<String, String>) -> Option<BTreeMap<String, String>> {
    (!map.is_empty()).then(|| map.clone())
}
