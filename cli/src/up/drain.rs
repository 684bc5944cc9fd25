//! What a person reads after Ctrl-C: how much is still to be finished, and how not to wait for it.

use std::net::SocketAddr;
use std::time::Duration;

use super::ready::get;

/// The router is in this process and has just served; a busy one must not delay the drain.
const ANSWER: Duration = Duration::from_millis(500);

/// Says that the drain begins.
pub async fn announce(router: SocketAddr) {
    let page = tokio::time::timeout(ANSWER, get(router, "/metrics")).await;
    let what = match page.ok().and_then(Result::ok).and_then(|page| in_flight(&page)) {
        Some(0) => "stopping".to_owned(),
        Some(1) => "draining 1 request".to_owned(),
        Some(requests) => format!("draining {requests} requests"),
        None => "draining".to_owned(),
    };
    eprintln!("router   {what}; Ctrl-C again ends at once");
}

/// Requests being served, from the router's metrics.
fn in_flight(page: &str) -> Option<u64> {
    page.lines().find_map(|line| line.strip_prefix("armature_frontend_inflight_requests ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_the_gauge_of_the_router() {
        let page = "# TYPE armature_frontend_inflight_requests gauge\narmature_frontend_inflight_requests 3\n";
        assert_eq!(in_flight(page), Some(3));
        assert_eq!(in_flight("HTTP/1.1 200 OK"), None);
    }
}
