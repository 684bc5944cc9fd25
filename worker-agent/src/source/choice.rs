//! Which GGUF file of a repository is meant when none is named.

use super::SourceError;

/// Quantisations from the most wanted: small without visible loss first, then what is left.
const PREFERRED: &[&str] = &["q4_k_m", "q8_0", "q4_0", "q4_1", "q5_k_m", "q6_k", "f16", "bf16", "f32"];

/// The only file, or the only one of the most wanted quantisation that is there. Parts of split models and vision
/// projectors are no candidates.
pub(super) fn choose(repo: &str, files: &[String]) -> Result<String, SourceError> {
    let whole = |file: &&String| {
        let name = file.to_ascii_lowercase();
        name.ends_with(".gguf") && !name.contains("-of-") && !name.contains("mmproj")
    };
    let candidates: Vec<&String> = files.iter().filter(whole).collect();
    if let [only] = candidates[..] {
        return Ok(only.clone());
    }
    for quantisation in PREFERRED {
        let of_it: Vec<_> = candidates.iter().filter(|file| is_of(file, quantisation)).collect();
        match of_it[..] {
            [] => {}
            [only] => return Ok((*only).clone()),
            _ => break,
        }
    }
    match candidates.is_empty() {
        true => Err(SourceError::NoGguf { repo: repo.into() }),
        false => Err(SourceError::Ambiguous { repo: repo.into(), choices: candidates.into_iter().cloned().collect() }),
    }
}

/// Whether the name ends with the quantisation, as in `model-Q8_0.gguf` and `model.q8_0.gguf`.
fn is_of(file: &str, quantisation: &str) -> bool {
    let name = file.to_ascii_lowercase();
    let stem = name.strip_suffix(".gguf").unwrap_or(&name);
    stem.strip_suffix(quantisation).is_some_and(|rest| rest.is_empty() || rest.ends_with(['-', '.', '_', '/']))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(files: &[&str]) -> Result<String, String> {
        choose("o/n", &files.iter().map(|f| (*f).to_string()).collect::<Vec<_>>()).map_err(|e| e.to_string())
    }

    #[test]
    fn the_most_wanted_quantisation_wins() {
        assert_eq!(chosen(&["m-F16.gguf", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "README.md"]), Ok("m-Q4_K_M.gguf".into()));
        assert_eq!(chosen(&["m.bf16.gguf", "m.q8_0.gguf"]), Ok("m.q8_0.gguf".into()));
        assert_eq!(chosen(&["m-bf16.gguf", "m-f16.gguf"]), Ok("m-f16.gguf".into()), "bf16 is not f16");
    }

    #[test]
    fn a_single_file_needs_no_known_name() {
        assert_eq!(chosen(&["x.gguf", "mmproj-x.gguf", "x-00001-of-00002.gguf"]), Ok("x.gguf".into()));
    }

    #[test]
    fn doubt_is_an_error_that_lists_the_choices() {
        let error = chosen(&["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"]).expect_err("two of them");
        assert!(error.contains("a-Q4_K_M.gguf, b-Q4_K_M.gguf"), "{error}");
        assert!(chosen(&["README.md"]).expect_err("none").contains("no GGUF file"));
    }
}
