//! What one agent tells another of a prompt that its server has computed: `disaggregated_params`, the name of the kind of server
//! beside what only servers of that kind understand.

use protocol::request_plane::Generate;
use serde::{Deserialize, Serialize};

/// As it is written.
#[derive(Serialize)]
struct Params<'a, T> {
    backend: &'a str,
    #[serde(flatten)]
    own: T,
}

/// What is read first.
#[derive(Deserialize)]
struct Named {
    backend: String,
}

/// Writes the parameters of a kind of server.
pub(super) fn write(backend: &str, own: impl Serialize) -> String {
    serde_json::to_string(&Params { backend, own }).expect("numbers, strings and what came as JSON")
}

/// Reads the parameters of a request that a server of this kind is to go on with.
pub(super) fn read<'a, T: Deserialize<'a>>(backend: &str, request: &'a Generate) -> Result<T, &'static str> {
    let text = &request.disaggregated_params;
    match serde_json::from_str::<Named>(text) {
        Ok(named) if named.backend == backend => {
            serde_json::from_str(text).map_err(|_| "the parameters are unreadable")
        }
        _ => Err("the parameters are another engine's"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::*;

    #[derive(Serialize, Deserialize)]
    struct Own<'a> {
        #[serde(borrow)]
        state: &'a RawValue,
    }

    #[test]
    fn what_only_servers_understand_goes_on_as_it_came() {
        let state = r#"{"id": 18446744073709551615, "x": 1.50}"#;
        let own: &RawValue = serde_json::from_str(state).expect("JSON");
        let request = Generate { disaggregated_params: write("vllm", Own { state: own }), ..Generate::default() };
        assert!(request.disaggregated_params.starts_with(r#"{"backend":"vllm","state":{"#));
        assert_eq!(read::<Own<'_>>("vllm", &request).expect("its own").state.get(), state);
        let why = |backend, text: &str| {
            let request = Generate { disaggregated_params: text.into(), ..Generate::default() };
            read::<Own<'_>>(backend, &request).err()
        };
        assert_eq!(why("sglang", &request.disaggregated_params), Some("the parameters are another engine's"));
        assert_eq!(why("vllm", "rubbish"), Some("the parameters are another engine's"));
        assert_eq!(why("vllm", r#"{"backend":"vllm"}"#), Some("the parameters are unreadable"));
    }
}
