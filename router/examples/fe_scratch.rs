//! scratch
use std::sync::Arc;
use protocol::metadata::*;
use protocol::request_plane::*;
use router::backend::*;
use router::http::*;
use router::http::metrics::FrontendMetrics;
use router::model::*;

fn rss() -> String {
    let s = std::fs::read_to_string("/proc/self/status").unwrap();
    s.lines().filter(|l| l.starts_with("VmRSS") || l.starts_with("VmHWM")).collect::<Vec<_>>().join(" ")
}
struct Instant0(Arc<ServedModel>, usize);
impl Backend for Instant0 {
    fn model(&self, n: &str) -> Option<Arc<ServedModel>> { (n == "smollm2").then(|| self.0.clone()) }
    fn models(&self) -> Vec<Arc<ServedModel>> { vec![self.0.clone()] }
    fn synced(&self) -> bool { true }
    async fn generate(&self, r: Generate, _: RouteOptions) -> Result<Routed, DispatchError> {
        let n = (r.stop.as_ref().unwrap().max_tokens as usize).min(self.1);
        let ids = r.token_ids;
        let lp = r.logprobs;
        let items = (0..n).map(move |i| {
            let t = ids[i % ids.len()];
            let logprobs = lp.map(|k| TokenLogprobs { token_id: t, logprob: -0.1, top: (0..k).map(|j| TopLogprob { token_id: 100 + j, logprob: -1.0 }).collect() }).into_iter().collect();
            Ok(StreamItem::Output(Output { token_ids: vec![t], logprobs, first: i == 0, ..Default::default() }))
        });
        let end = Ok(StreamItem::Finished(Finished { reason: FinishReason::Length.into(), completion_tokens: n as u32, ..Default::default() }));
        Ok(Routed { worker_id: 1, worker_name: "w".into(), overlap_blocks: 0, stream: Box::pin(futures::stream::iter(items.chain([end]))) })
    }
}
fn main() {
    eprintln!("start {}", rss());
    let rt = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let t = std::time::Instant::now();
    let files = ModelFiles { tokenizer_json: std::fs::read("/tmp/smol-tokenizer.json").unwrap(), chat_template: Some(std::fs::read_to_string("/tmp/smol-template.jinja").unwrap()), special_tokens: None };
    let card = ModelCard { display_name: "smollm2".into(), context_length: 1 << 20, kv_cache_block_size: 16, armature: Some(ArmatureCard { eos_token_ids: vec![2], ..Default::default() }), ..Default::default() };
    let c2 = card.clone();
    let model = rt.block_on(async { tokio::task::spawn_blocking(move || Model::load(files, &c2)).await.unwrap().unwrap() });
    eprintln!("loaded {:?} {} {}", t.elapsed(), model.tokenizer_name(), rss());
    let text = "The quick brown fox jumps over the lazy dog, and then it's 1234 again.\n".repeat(3200);
    for _ in 0..3 { let t = std::time::Instant::now(); let n = model.encode_prompt(&text).unwrap().len(); eprintln!("227KB {:?} {n} {}", t.elapsed(), rss()); }
    let tokens: usize = std::env::args().nth(1).map_or(16, |s| s.parse().unwrap());
    let backend = Arc::new(Instant0(Arc::new(ServedModel { card, model: Arc::new(model), created_s: 1 }), tokens));
    let (m, mut reg) = (FrontendMetrics::default(), Default::default());
    m.register(&mut reg);
    rt.block_on(async {
        let l = tokio::net::TcpListener::bind("127.0.0.1:18999").await.unwrap();
        eprintln!("serving {}", rss());
        let sd = tokio_util::sync::CancellationToken::new();
        tokio::spawn(async { loop { tokio::time::sleep(std::time::Duration::from_secs(5)).await; eprintln!("{}", rss()); } });
        serve(l, backend, FrontendConfig::default(), Arc::new(m), Arc::new(reg), sd).await;
    });
}
