//! What can go wrong in a reconcile, and the one place that says what follows: reason, metric label, time to the next try.

use std::time::Duration;

use kube::runtime::controller::Action;

use crate::validate::Invalid;

/// Longest wait for one answer of the API server. Watches have their own limit.
pub const CALL_DEADLINE: Duration = Duration::from_secs(15);

/// Why a reconcile stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The object cannot be carried out as it is.
    #[error("{0}")]
    Invalid(#[from] Invalid),
    /// An object of this name belongs to somebody else; it is left alone.
    #[error("{kind} {name} exists and does not belong to this object; rename one of them")]
    NotOurs {
        /// Its kind.
        kind: String,
        /// Its name.
        name: String,
    },
    /// The API server refused, or could not be reached.
    #[error("{stage}: {source}")]
    Api {
        /// What was being done.
        stage: String,
        /// What it said.
        source: Box<kube::Error>,
    },
    /// The API server did not answer in time.
    #[error("{stage}: no answer within {} s", after.as_secs())]
    Deadline {
        /// What was being done.
        stage: String,
        /// The limit.
        after: Duration,
    },
}

impl Error {
    /// Reason for conditions, events and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Invalid(invalid) => invalid.reason(),
            Self::NotOurs { .. } => "NameTaken",
            Self::Api { source, .. } => match source.as_ref() {
                kube::Error::Api(status) if status.code == 409 => "Conflict",
                kube::Error::Api(status) if status.code == 403 => "Forbidden",
                // Overload, restarts and failing webhooks say nothing about the object.
                kube::Error::Api(status) if status.code == 429 || status.code >= 500 => "Unreachable",
                kube::Error::Api(_) => "Refused",
                _ => "Unreachable",
            },
            Self::Deadline { .. } => "Deadline",
        }
    }

    /// When to try again. A changed object is tried at once in any case.
    pub fn retry(&self) -> Action {
        let seconds = match self.reason() {
            "Conflict" => 1,
            "Unreachable" | "Deadline" | "Refused" => 5,
            _ => 60,
        };
        Action::requeue(Duration::from_secs(seconds))
    }

    /// Whether the object's author should hear of it; conflicts, lost connections and an API server in trouble pass by
    /// themselves.
    pub fn concerns_author(&self) -> bool {
        matches!(self, Self::Invalid(_) | Self::NotOurs { .. }) || matches!(self.reason(), "Refused" | "Forbidden")
    }
}

/// Awaits one call under [`CALL_DEADLINE`] and names it in the error.
pub async fn call<T>(
    stage: impl FnOnce() -> String,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Error> {
    within(CALL_DEADLINE, stage, call).await
}

async fn within<T>(
    after: Duration,
    stage: impl FnOnce() -> String,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Error> {
    match tokio::time::timeout(after, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => Err(Error::Api { stage: stage(), source: Box::new(source) }),
        Err(_) => Err(Error::Deadline { stage: stage(), after }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_call_without_answer_names_its_stage() {
        let silent = std::future::pending::<Result<(), kube::Error>>();
        let error = within(Duration::from_millis(1), || "applying Service chat".into(), silent)
            .await
            .expect_err("it never answers");
        assert_eq!(error.to_string(), "applying Service chat: no answer within 0 s");
        assert!(!error.concerns_author());
    }

    #[test]
    fn an_api_server_in_trouble_is_not_the_authors_business() {
        let cases = [
            (400, "Refused", true),
            (403, "Forbidden", true),
            (404, "Refused", true),
            (409, "Conflict", false),
            (422, "Refused", true),
            (429, "Unreachable", false),
            (500, "Unreachable", false),
            (503, "Unreachable", false),
            (504, "Unreachable", false),
        ];
        for (code, reason, concerns_author) in cases {
            let status = kube::core::Status::failure("no", "Reason").with_code(code).boxed();
            let error = Error::Api { stage: "applying".into(), source: Box::new(kube::Error::Api(status)) };
            assert_eq!((error.reason(), error.concerns_author()), (reason, concerns_author), "{code}");
        }
    }

    #[test]
    fn a_taken_name_is_the_authors_business() {
        let error = Error::NotOurs { kind: "Service".into(), name: "chat".into() };
        assert_eq!((error.reason(), error.concerns_author()), ("NameTaken", true));
    }
}
