//! Where a model comes from: `hf://org/name`, `pvc://claim/path` or `file:///path`.
//!
//! The definition's rule refuses anything else before it is stored; parsing here is for objects that were stored before a
//! rule existed.

/// A parsed `spec.model.source`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A repository on a Hugging Face hub: `org/name`, optionally with `@revision` and a file below it.
    Hub(String),
    /// A path within a PersistentVolumeClaim of the same namespace.
    Claim {
        /// Name of the claim.
        claim: String,
        /// Path below the volume's root, without a leading slash.
        path: String,
    },
    /// An absolute path on every node that may run a worker.
    Node(String),
}

/// Why a source is not understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidSource;

/// What the rule on the field says; one text for the API server and for us.
pub const SOURCE_MESSAGE: &str =
    "must be hf://org/name[@revision][/file.gguf], pvc://claim/path or file:///path, without .. in it";

/// The rule on the field (CEL).
pub const SOURCE_RULE: &str = "self.matches('^(hf://[A-Za-z0-9._-]+/[A-Za-z0-9._/@-]+|pvc://[a-z0-9.-]+/[^/].*|file:///[^/].*)$') && !self.matches('(^|/)\\\\.\\\\.(/|$)')";

impl Source {
    /// Parses `source`.
    pub fn parse(source: &str) -> Result<Self, InvalidSource> {
        let (scheme, rest) = source.split_once("://").ok_or(InvalidSource)?;
        if rest.split('/').any(|part| part == "..") {
            return Err(InvalidSource);
        }
        match (scheme, rest.split_once('/').ok_or(InvalidSource)?) {
            ("hf", (org, name)) if !org.is_empty() && !name.is_empty() => Ok(Self::Hub(rest.into())),
            ("pvc", (claim, path)) if !claim.is_empty() && !path.is_empty() => {
                Ok(Self::Claim { claim: claim.into(), path: path.into() })
            }
            ("file", ("", path)) if !path.is_empty() => Ok(Self::Node(rest.into())),
            _ => Err(InvalidSource),
        }
    }
}

impl std::fmt::Display for InvalidSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(SOURCE_MESSAGE)
    }
}

impl std::error::Error for InvalidSource {}
