//! Routers behind their headless Service: every address of its EndpointSlices, ready or not.
//!
//! A router that is not ready waits for nobody's requests and has none, but it must hear of the others' before it is; one
//! that terminates still has some.

use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Client;
use kube::api::Api;
use tokio::sync::watch;

use super::publish;
use crate::discovery::kubernetes::store::watch as follow;
use crate::replicas::mesh::View;
use crate::replicas::options::SYNC_PORT_NAME;

/// Label by which a slice names its Service.
const SERVICE_LABEL: &str = "kubernetes.io/service-name";

/// Publishes views for ever.
pub(super) async fn run(client: Client, namespace: Option<String>, service: String, to: watch::Sender<Option<View>>) {
    let namespace = namespace.unwrap_or_else(|| client.default_namespace().to_owned());
    let slices: Api<EndpointSlice> = Api::namespaced(client, &namespace);
    let mut slices = follow("EndpointSlice", slices, Some(format!("{SERVICE_LABEL}={service}")), addresses);
    loop {
        slices.changed().await;
        if let Some(slices) = slices.list() {
            publish(&to, slices.values().flatten().cloned().collect());
        }
    }
}

/// `host:port` of every endpoint of a slice.
fn addresses(slice: EndpointSlice) -> Option<Vec<String>> {
    let mut ports = slice.ports.into_iter().flatten();
    let port = ports.find(|port| port.name.as_deref() == Some(SYNC_PORT_NAME))?.port?;
    let hosts = slice.endpoints.into_iter().filter_map(|endpoint| endpoint.addresses.into_iter().next());
    let bracketed = slice.address_type == "IPv6";
    Some(hosts.map(|host| if bracketed { format!("[{host}]:{port}") } else { format!("{host}:{port}") }).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn slice(address_type: &str, addresses: &[&str], ports: serde_json::Value) -> EndpointSlice {
        let conditions = json!({"ready": false, "serving": true, "terminating": true});
        let endpoints: Vec<_> =
            addresses.iter().map(|address| json!({"addresses": [address], "conditions": conditions})).collect();
        serde_json::from_value(
            json!({"addressType": address_type, "metadata": {"name": "s"}, "endpoints": endpoints, "ports": ports}),
        )
        .expect("a slice")
    }

    #[test]
    fn every_endpoint_counts_at_the_port_of_that_name() {
        let ports = json!([{"name": "http", "port": 8000}, {"name": "sync", "port": 9002}]);
        let found = addresses(slice("IPv4", &["10.0.0.1", "10.0.0.2"], ports.clone()));
        assert_eq!(found, Some(vec!["10.0.0.1:9002".to_owned(), "10.0.0.2:9002".to_owned()]));
        assert_eq!(addresses(slice("IPv6", &["fd00::1"], ports)), Some(vec!["[fd00::1]:9002".to_owned()]));
        assert_eq!(addresses(slice("IPv4", &["10.0.0.1"], json!(null))), None);
    }
}
