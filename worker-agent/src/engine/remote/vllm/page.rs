//! What vLLM's page of metrics says: how large its cache is, and how busy it is.

use super::super::dialect::Busy;

/// Sizes of the KV cache, as far as the page tells.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CacheConfig {
    /// Tokens of a block.
    pub(super) block_size: Option<usize>,
    /// Blocks on the device.
    pub(super) blocks: Option<usize>,
    /// Data-parallel ranks that this server has; older ones do not say.
    pub(super) ranks: Vec<u32>,
}

/// A line of the page.
struct Sample<'a> {
    name: &'a str,
    labels: &'a str,
    value: f64,
}

/// The samples of vLLM's own metrics; what cannot be read is left out.
fn samples(page: &str) -> impl Iterator<Item = Sample<'_>> {
    page.lines().filter_map(|line| {
        let line = line.strip_prefix("vllm:")?;
        let (series, value) = line.rsplit_once(' ')?;
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        Some(Sample { name, labels: labels.trim_end_matches('}'), value: value.parse().ok()? })
    })
}

impl<'a> Sample<'a> {
    /// A label's value. Values with quotes or backslashes in them are not those that are looked for.
    fn label(&self, wanted: &str) -> Option<&'a str> {
        let mut rest = self.labels;
        loop {
            let (name, after) = rest.split_once("=\"")?;
            let (value, next) = after.split_once('"')?;
            if name.trim_start_matches(',') == wanted {
                return Some(value);
            }
            rest = next;
        }
    }

    /// Whether it is of this rank, or of any.
    fn is_of(&self, rank: Option<u32>) -> bool {
        let engine = || self.label("engine").and_then(|engine| engine.parse().ok());
        rank.is_none_or(|rank| engine().is_none_or(|engine: u32| engine == rank))
    }
}

/// Sizes of the cache; those of the first rank, which are those of all.
pub(super) fn cache_config(page: &str) -> CacheConfig {
    let mut of_ranks = samples(page).filter(|sample| sample.name == "cache_config_info");
    let Some(sample) = of_ranks.next() else { return CacheConfig::default() };
    let number = |label: &str| sample.label(label)?.parse().ok();
    let rank = |sample: &Sample<'_>| sample.label("engine")?.parse().ok();
    let ranks = rank(&sample).into_iter().chain(of_ranks.filter_map(|sample| rank(&sample))).collect();
    CacheConfig { block_size: number("block_size"), blocks: number("num_gpu_blocks"), ranks }
}

/// How busy it is: the sum over its ranks, or one of them.
pub(super) fn load(page: &str, rank: Option<u32>) -> Busy {
    let (mut busy, mut tokens) = (Busy::default(), None);
    for sample in samples(page).filter(|sample| sample.is_of(rank)) {
        match sample.name {
            "num_requests_running" => busy.running += sample.value.max(0.0) as usize,
            "num_requests_waiting" => busy.waiting += sample.value.max(0.0) as usize,
            // Its name changed.
            "kv_cache_usage_perc" | "gpu_cache_usage_perc" => busy.kv_usage = busy.kv_usage.max(sample.value),
            // Prompt tokens are counted when all of a prompt is computed.
            "generation_tokens_total" | "prompt_tokens_total" => *tokens.get_or_insert(0.0) += sample.value,
            _ => {}
        }
    }
    // A prompt that is computed in pieces takes blocks with each of them.
    busy.moves = tokens.map(|tokens: f64| tokens.to_bits() ^ busy.kv_usage.to_bits().rotate_left(32));
    busy
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = r#"# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} NaN
vllm:cache_config_info{_block_size_resolved="True",effective_attention_block_size="64",block_size="32",engine="0",hash_block_size="None",num_gpu_blocks="1456",num_gpu_blocks_override="None"} 1.0
python_info{version="3.11"} 1.0
"#;

    #[test]
    fn sizes_and_load_are_read_from_the_page() {
        assert_eq!(cache_config(PAGE), CacheConfig { block_size: Some(32), blocks: Some(1456), ranks: vec![0] });
        let another = PAGE.lines().find(|line| line.contains("cache_config_info")).expect("a line");
        let both = format!("{PAGE}{}\n", another.replace("engine=\"0\"", "engine=\"1\""));
        assert_eq!(cache_config(&both).ranks, [0, 1]);
        assert_eq!(load(PAGE, None), Busy { running: 5, waiting: 1, kv_usage: 0.25, ..Busy::default() });
        assert_eq!(load(PAGE, Some(1)), Busy { running: 2, waiting: 0, kv_usage: 0.0, ..Busy::default() });
        let old = "vllm:gpu_cache_usage_perc{model_name=\"m\"} 0.5\nvllm:num_requests_running 1.0\n";
        assert_eq!(
            load(old, Some(0)),
            Busy { running: 1, waiting: 0, kv_usage: 0.5, ..Busy::default() },
            "an older one has no ranks"
        );
    }

    #[test]
    fn figures_move_with_each_step_of_the_rank_and_with_nothing_else() {
        let page = |generated: u32, prompt: u32, usage: f64, others: u32| {
            let page = format!(
                "{PAGE}vllm:generation_tokens_total{{engine=\"0\"}} {generated}.0\nvllm:prompt_tokens_total{{engine=\"0\"}} {prompt}.0\n\
                 vllm:generation_tokens_total{{engine=\"1\"}} {others}.0\nvllm:kv_cache_usage_perc{{engine=\"0\"}} {usage}\n\
                 http_requests_total {others}.0\n"
            );
            load(&page, Some(0)).moves.expect("it tells them")
        };
        let before = page(10, 100, 0.5, 1);
        assert_eq!(page(10, 100, 0.5, 2), before);
        for after in [page(11, 100, 0.5, 1), page(10, 150, 0.5, 1), page(10, 100, 0.75, 1)] {
            assert_ne!(after, before);
        }
        assert_eq!(load(PAGE, None).moves, None);
    }

    #[test]
    fn what_is_not_there_or_not_readable_is_not_told() {
        assert_eq!(cache_config(""), CacheConfig::default());
        let early = "vllm:cache_config_info{block_size=\"32\",num_gpu_blocks=\"None\"} 1.0";
        assert_eq!(cache_config(early), CacheConfig { block_size: Some(32), blocks: None, ranks: Vec::new() });
        assert_eq!(load("vllm:num_requests_running{engine=\"0\" x\nvllm:\n\u{0}", None), Busy::default());
    }
}
