//! Writes to the cluster: server-side apply under one field manager, only to what is ours, and deletion of what is not
//! wanted any more.

use std::fmt::Debug;

use k8s_openapi::NamespaceResourceScope;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, Preconditions, PropagationPolicy};
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::{Error, call};

/// Field manager of everything that the operator applies.
pub const FIELD_MANAGER: &str = "armature-operator";

/// A namespaced object that can be applied.
pub trait Applied:
    Resource<DynamicType = (), Scope = NamespaceResourceScope>
    + Clone
    + Debug
    + Serialize
    + DeserializeOwned
    + Send
    + 'static
{
}

impl<K> Applied for K where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + Serialize
        + DeserializeOwned
        + Send
        + 'static
{
}

/// Applies `object`, which names its owner, and returns it as stored. Applying what is there already changes nothing.
pub async fn apply<K: Applied>(client: &Client, object: &K) -> Result<K, Error> {
    let (name, namespace) = (object.name_any(), object.namespace().unwrap_or_default());
    let api: Api<K> = Api::namespaced(client.clone(), &namespace);
    let kind = K::kind(&());
    let existing = call(|| format!("reading {kind} {name}"), api.get_metadata_opt(&name)).await?;
    if let Some(existing) = existing
        && !same_controller(object.owner_references(), existing.owner_references())
    {
        return Err(Error::NotOurs { kind: kind.into_owned(), name });
    }
    // A derived custom resource serializes with apiVersion and kind, and so do the generated Kubernetes types.
    let patch = Patch::Apply(object);
    call(|| format!("applying {kind} {name}"), api.patch(&name, &force(), &patch)).await
}

/// Applies an object that differs from its type: fields left out, or a resourceVersion that must still hold.
pub async fn apply_value<K: Applied>(client: &Client, namespace: &str, name: &str, object: &Value) -> Result<K, Error> {
    let api: Api<K> = Api::namespaced(client.clone(), namespace);
    call(|| format!("applying {} {name}", K::kind(&())), api.patch(name, &force(), &Patch::Apply(object))).await
}

/// Applies `status`. Callers compare first: an unchanged status is not written.
pub async fn apply_status<K: Applied>(client: &Client, object: &K, status: &impl Serialize) -> Result<(), Error> {
    let (name, namespace) = (object.name_any(), object.namespace().unwrap_or_default());
    let api: Api<K> = Api::namespaced(client.clone(), &namespace);
    let kind = K::kind(&());
    let patch = serde_json::json!({
        "apiVersion": K::api_version(&()),
        "kind": kind,
        "metadata": {"name": name, "uid": object.uid()},
        "status": status,
    });
    call(|| format!("writing the status of {kind} {name}"), api.patch_status(&name, &force(), &Patch::Apply(&patch)))
        .await?;
    Ok(())
}

/// What `owner` controls among the objects that `labels` selects.
pub async fn owned<K: Applied>(
    client: &Client,
    namespace: &str,
    labels: &str,
    owner_uid: &str,
) -> Result<Vec<K>, Error> {
    let api: Api<K> = Api::namespaced(client.clone(), namespace);
    let selected = ListParams::default().labels(labels);
    let list = call(|| format!("listing {}", K::plural(&())), api.list(&selected)).await?;
    Ok(list.items.into_iter().filter(|item| controller_uid(item.owner_references()) == Some(owner_uid)).collect())
}

/// Deletes `object` if it is still the one that was seen; gone already is fine.
pub async fn delete<K: Applied>(client: &Client, object: &K) -> Result<(), Error> {
    let (name, namespace) = (object.name_any(), object.namespace().unwrap_or_default());
    let api: Api<K> = Api::namespaced(client.clone(), &namespace);
    let params = DeleteParams {
        propagation_policy: Some(PropagationPolicy::Background),
        preconditions: Some(Preconditions { uid: object.uid(), resource_version: None }),
        ..DeleteParams::default()
    };
    match call(|| format!("deleting {} {name}", K::kind(&())), api.delete(&name, &params)).await {
        Err(Error::Api { source, .. }) if matches!(source.as_ref(), kube::Error::Api(status) if status.code == 404) => {
            Ok(())
        }
        other => other.map(|_| ()),
    }
}

fn force() -> PatchParams {
    PatchParams::apply(FIELD_MANAGER).force()
}

type Owners = [k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference];

fn controller_uid(owners: &Owners) -> Option<&str> {
    owners.iter().find(|owner| owner.controller == Some(true)).map(|owner| owner.uid.as_str())
}

fn same_controller(wanted: &Owners, found: &Owners) -> bool {
    controller_uid(wanted).is_some() && controller_uid(wanted) == controller_uid(found)
}
