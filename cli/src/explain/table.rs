//! An explanation as people read it. Costs and loads are in blocks of the KV cache.

use std::fmt::Write;

use serde_json::Value;

/// Names of the columns; the last one is as long as it likes.
const HEAD: [&str; 9] = ["worker", "overlap", "device", "host", "disk", "prefill", "decode", "cost", "verdict"];

/// An explanation, or the attempts of a past request.
pub fn all(answer: &Value) -> String {
    let mut text = String::new();
    match answer["attempts"].as_array() {
        Some(attempts) => {
            for (number, attempt) in attempts.iter().enumerate() {
                // Each choice of a request is one by itself.
                let of = attempt["request"].as_str().map_or_else(String::new, |request| format!(" of {request}"));
                let _ = writeln!(text, "attempt {}{of}", number + 1);
                text.push_str(&one(attempt));
            }
        }
        None => {
            let prefill = &answer["prefill"];
            if prefill["workers"].is_array() {
                text.push_str("computing the prompt\n");
                text.push_str(&one(prefill));
                text.push_str("generating the answer\n");
            }
            text.push_str(&one(answer));
            if let Some(reason) = prefill["local"].as_str() {
                let _ = writeln!(text, "no prefill worker computes the prompt: {reason}");
            }
        }
    }
    text
}

fn one(explanation: &Value) -> String {
    let (tokens, size) = (whole(&explanation["prompt_tokens"]), whole(&explanation["block_size"]).max(1));
    let mut text = format!("prompt {tokens} tokens = {} blocks + {} tokens\n", tokens / size, tokens % size);
    let mut rows = vec![HEAD.map(str::to_owned)];
    rows.extend(explanation["workers"].as_array().into_iter().flatten().map(row));
    let widths: [usize; 9] =
        std::array::from_fn(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
    for row in &rows {
        // Names and verdicts begin where their column does; numbers end there.
        let _ = write!(text, "{:<width$}", row[0], width = widths[0]);
        for column in 1..8 {
            let _ = write!(text, "  {:>width$}", row[column], width = widths[column]);
        }
        let _ = writeln!(text, "    {}", row[8]);
    }
    let outcome = &explanation["outcome"];
    match outcome["refusal"].as_str() {
        Some(refusal) => {
            let _ = writeln!(text, "refused: {refusal}");
        }
        None => {
            let pick = &outcome["pick"];
            let how = pick["how"].as_str().unwrap_or("?");
            let detail = match (pick["ties"].as_u64(), pick["probability"].as_f64()) {
                (Some(ties @ 2..), _) => format!(", one of {ties} alike"),
                (_, Some(probability)) => format!(", with a probability of {probability:.3}"),
                _ => String::new(),
            };
            let mode = explanation["mode"].as_str().unwrap_or("?");
            let _ = writeln!(text, "mode {mode}: {how}{detail}, among {}", whole(&outcome["eligible"]));
        }
    }
    text
}

fn row(worker: &Value) -> [String; 9] {
    let id = || format!("worker {}", whole(&worker["worker_id"]));
    let name = worker["worker"].as_str().map_or_else(id, str::to_owned);
    let name = match whole(&worker["dp_rank"]) {
        0 => name,
        rank => format!("{name}/{rank}"),
    };
    let verdict = match worker["verdict"].as_str().unwrap_or("?") {
        "eligible" => String::new(),
        verdict => verdict.to_owned(),
    };
    let terms = &worker["terms"];
    if terms.is_null() {
        let none = || "-".to_owned();
        return [name, none(), none(), none(), none(), none(), none(), none(), verdict];
    }
    let overlap = |tier: &str| whole(&worker["overlap"][tier]);
    let sum = ["device", "host", "disk", "shared"].map(overlap).iter().sum::<u64>();
    let blocks = |term: &str| format!("{:.1}", terms[term].as_f64().unwrap_or(f64::NAN));
    [
        name,
        sum.to_string(),
        overlap("device").to_string(),
        overlap("host").to_string(),
        overlap("disk").to_string(),
        blocks("adjusted_prefill_blocks"),
        blocks("decode_blocks"),
        blocks("cost"),
        verdict,
    ]
}

fn whole(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn worker(name: &str, device: u64, prefill: f64, decode: f64, verdict: &str) -> Value {
        json!({"worker": name, "worker_id": 7, "dp_rank": 0, "verdict": verdict, "overlap": {"device": device, "host": 0,
            "disk": 0, "shared": 0}, "terms": {"adjusted_prefill_blocks": prefill, "decode_blocks": decode, "cost": prefill + decode}})
    }

    #[test]
    fn a_table_has_a_line_for_each_worker_and_one_for_the_choice() {
        let mut out = worker("chat-z7", 0, 0.0, 0.0, "excluded: draining");
        out["terms"] = Value::Null;
        let explanation = json!({"mode": "kv", "prompt_tokens": 812, "block_size": 16,
            "outcome": {"worker": "chat-x2", "eligible": 2, "pick": {"how": "lowest cost", "ties": 1}},
            "workers": [worker("chat-x2", 48, 2.75, 31.0, "chosen"), worker("chat-q1", 0, 50.75, 4.0, "eligible"), out]});
        let expected = "\
prompt 812 tokens = 50 blocks + 12 tokens
worker   overlap  device  host  disk  prefill  decode  cost    verdict
chat-x2       48      48     0     0      2.8    31.0  33.8    chosen
chat-q1        0       0     0     0     50.8     4.0  54.8    
chat-z7        -       -     -     -        -       -     -    excluded: draining
mode kv: lowest cost, among 2
";
        assert_eq!(all(&explanation), expected);
    }

    #[test]
    fn who_computes_the_prompt_is_shown_first_or_why_nobody_else_does() {
        let mut explanation = json!({"mode": "kv", "prompt_tokens": 812, "block_size": 16,
            "outcome": {"worker": "decode-0", "eligible": 1, "pick": {"how": "lowest cost", "ties": 1}},
            "workers": [worker("decode-0", 0, 0.0, 4.0, "chosen")]});
        let mut prefill = explanation.clone();
        prefill["workers"] = json!([worker("prefill-0", 0, 50.75, 4.0, "chosen")]);
        explanation["prefill"] = prefill;
        let text = all(&explanation);
        let order =
            ["computing the prompt", "prefill-0", "generating the answer", "decode-0"].map(|part| text.find(part));
        assert!(order.iter().all(Option::is_some) && order.is_sorted(), "{text}");
        explanation["prefill"] = json!({"local": "kv differs"});
        let text = all(&explanation);
        assert!(text.ends_with("no prefill worker computes the prompt: kv differs\n"), "{text}");
    }

    #[test]
    fn attempts_are_numbered_and_a_refusal_says_why() {
        let refused = json!({"mode": "kv", "prompt_tokens": 1, "block_size": 16, "workers": [],
            "outcome": {"refusal": "no worker serves the model"}});
        let text = all(&json!({"id": "x", "attempts": [refused, refused]}));
        assert!(text.starts_with("attempt 1\n") && text.contains("attempt 2\n"), "{text}");
        let choices = all(&json!({"attempts": [{"request": "x-0"}, {"request": "x-1"}]}));
        assert!(choices.starts_with("attempt 1 of x-0\n") && choices.contains("attempt 2 of x-1\n"), "{choices}");
        assert_eq!(text.matches("refused: no worker serves the model").count(), 2);
    }
}
