//! Errors in OpenAI's shape, and the one place where a cluster error becomes a status, a type, a code and a metric
//! label.

use std::borrow::Cow;

use bytes::Bytes;
use hyper::StatusCode;
use serde_json::json;

use super::routing::WORKER_HEADER;
use crate::backend::DispatchError;

/// An answer that is an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// OpenAI's `type`.
    pub kind: &'static str,
    /// OpenAI's `code`.
    pub code: Option<&'static str>,
    /// The field at fault, as a path: `messages[0].role`.
    pub param: Option<Cow<'static, str>>,
    /// For a person, one line.
    pub message: String,
    /// Value of the metric label `status`.
    pub label: &'static str,
}

const INVALID: &str = "invalid_request_error";
const SERVER: &str = "server_error";

impl ApiError {
    /// 400: a field is wrong.
    pub fn invalid(param: impl Into<Cow<'static, str>>, message: impl Into<String>) -> ApiError {
        ApiError { param: Some(param.into()), ..ApiError::bad_request(message) }
    }

    /// 400 without a field.
    pub fn bad_request(message: impl Into<String>) -> ApiError {
        ApiError {
            status: StatusCode::BAD_REQUEST,
            kind: INVALID,
            code: None,
            param: None,
            message: message.into(),
            label: "invalid_request",
        }
    }

    /// 400: prompt and answer do not fit into the model's context.
    pub fn context_length(param: &'static str, message: String) -> ApiError {
        ApiError { code: Some("context_length_exceeded"), ..ApiError::invalid(param, message) }
    }

    /// 404: nothing is known of the request asked about.
    pub fn unknown_request(message: String) -> ApiError {
        ApiError { status: StatusCode::NOT_FOUND, label: "not_found", ..ApiError::bad_request(message) }
    }

    /// 404: no such model.
    pub fn model_not_found(model: &str) -> ApiError {
        ApiError {
            status: StatusCode::NOT_FOUND,
            code: Some("model_not_found"),
            label: "not_found",
            ..ApiError::invalid("model", format!("the model {model:?} does not exist"))
        }
    }

    /// 404: no such path.
    pub fn no_route(path: &str) -> ApiError {
        ApiError {
            status: StatusCode::NOT_FOUND,
            label: "not_found",
            ..ApiError::bad_request(format!("unknown path {path}"))
        }
    }

    /// 405.
    pub fn method_not_allowed(method: &str, path: &str, allowed: &str) -> ApiError {
        ApiError {
            status: StatusCode::METHOD_NOT_ALLOWED,
            ..ApiError::bad_request(format!("{method} is not allowed on {path}; use {allowed}"))
        }
    }

    /// 413.
    pub fn body_too_large(limit: usize) -> ApiError {
        ApiError {
            status: StatusCode::PAYLOAD_TOO_LARGE,
            ..ApiError::bad_request(format!("request body is over the limit of {limit} bytes"))
        }
    }

    /// 413: too many values, however small.
    pub fn too_many_values(limit: usize) -> ApiError {
        ApiError {
            status: StatusCode::PAYLOAD_TOO_LARGE,
            ..ApiError::bad_request(format!("request body is over the limit of {limit} JSON values and names"))
        }
    }

    /// 408: the body has stopped arriving.
    pub fn body_stalled() -> ApiError {
        ApiError {
            status: StatusCode::REQUEST_TIMEOUT,
            ..ApiError::bad_request("request body arrives too slowly, or has stopped")
        }
    }

    /// 408: the body did not arrive in time.
    pub fn body_timeout(seconds: u64) -> ApiError {
        ApiError {
            status: StatusCode::REQUEST_TIMEOUT,
            ..ApiError::bad_request(format!("request body did not arrive within {seconds} s"))
        }
    }

    /// 429: the router itself has no room.
    pub fn busy(message: &str) -> ApiError {
        ApiError {
            status: StatusCode::TOO_MANY_REQUESTS,
            kind: "rate_limit_error",
            code: Some("overloaded"),
            label: "overloaded",
            ..ApiError::bad_request(format!("{message}; send the request again"))
        }
    }

    /// 503: the process is going down.
    pub fn shutting_down() -> ApiError {
        ApiError {
            status: StatusCode::SERVICE_UNAVAILABLE,
            kind: SERVER,
            code: Some("shutting_down"),
            label: "shutting_down",
            ..ApiError::bad_request("the router is shutting down; send the request again")
        }
    }

    /// 500: a defect of ours.
    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            kind: SERVER,
            label: "internal",
            ..ApiError::bad_request(message)
        }
    }

    /// `{"error": {…}}`.
    pub fn body(&self) -> Bytes {
        let error = json!({"message": self.message, "type": self.kind, "param": self.param, "code": self.code});
        Bytes::from(json!({ "error": error }).to_string())
    }
}

impl From<DispatchError> for ApiError {
    fn from(error: DispatchError) -> ApiError {
        let (status, kind, code, label) = classify(&error);
        let param = match error {
            DispatchError::UnknownWorker { named_by, .. } => named_by.map(Cow::from),
            DispatchError::NeedsWorker => Some(WORKER_HEADER.into()),
            _ => None,
        };
        ApiError { status, kind, code, param, message: error.to_string(), label }
    }
}

/// Status, OpenAI's `type` and `code`, and metric label of a cluster error.
pub fn classify(error: &DispatchError) -> (StatusCode, &'static str, Option<&'static str>, &'static str) {
    match error {
        DispatchError::NoWorker { .. } => (StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("no_worker"), "no_worker"),
        DispatchError::Busy { .. } => (StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("workers_busy"), "busy"),
        DispatchError::UnknownWorker { .. } => {
            (StatusCode::BAD_REQUEST, INVALID, Some("unknown_worker"), "invalid_request")
        }
        DispatchError::NeedsWorker => (StatusCode::BAD_REQUEST, INVALID, Some("worker_required"), "invalid_request"),
        DispatchError::Overloaded(_) => {
            (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some("overloaded"), "overloaded")
        }
        DispatchError::Invalid(_) => (StatusCode::BAD_REQUEST, INVALID, None, "invalid_request"),
        DispatchError::Worker { .. } => (StatusCode::BAD_GATEWAY, SERVER, Some("worker_failed"), "worker_failed"),
        DispatchError::ShuttingDown(_) => {
            (StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("shutting_down"), "shutting_down")
        }
        DispatchError::Deadline { .. } => {
            (StatusCode::GATEWAY_TIMEOUT, "timeout_error", Some("deadline_exceeded"), "deadline")
        }
    }
}
