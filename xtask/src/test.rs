//! `cargo xtask test`: stages from fast to slow, each preceded by the set-up it needs.
//!
//! Set-up comes first for all stages, so that a missing tool shows before minutes of tests, and so that the closing lines
//! of the test runners stay at the end, where people and CI look.

mod chart;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::nixl::{self, Nixl};
use crate::process::{binaries, cargo, command, root, run as run_command, succeeds, target};
use crate::{cluster, cuda, image, model, python, setup, tidy, vllm};

/// Runs the tests.
#[derive(clap::Args)]
pub struct Args {
    /// Only this stage; may be given several times. Without it all but `vllm`, which installs 5 GB, `nixl`, which builds once
    /// more what moves KV, and `candle`, which compiles all of CUDA's kernels for many minutes the first time; that the worker compiles for
    /// CUDA is checked with kernels that are not optimised.
    #[arg(long, value_enum)]
    stage: Vec<Stage>,
}

/// A stage of the tests.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Stage {
    /// Formatting, lints, documentation, repository rules, unit and property tests, doc tests.
    Unit,
    /// Real processes on loopback: the Python bindings, `armature up`, kill tests, the official OpenAI client.
    Integration,
    /// Real pods in a real Kubernetes of two nodes.
    Cluster,
    /// Two real vLLM on CPU cores of their own, behind agents and a router. Installs 5 GB; needs two cores.
    Vllm,
    /// KV transfer with NIXL, built and run against the library of its Python package (95 MB, with libclang).
    Nixl,
    /// The engine on candle's tensors: on the processor, and compiled for CUDA; run there where a GPU and a toolkit are.
    Candle,
}

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Self::Unit => "unit",
            Self::Integration => "integration",
            Self::Cluster => "cluster",
            Self::Vllm => "vllm",
            Self::Nixl => "nixl",
            Self::Candle => "candle",
        }
    }

    fn prepare(self) -> anyhow::Result<()> {
        match self {
            Self::Unit => {
                // The engine's unit tests open the real model; tidy renders the chart.
                cluster::helm_binary().and_then(|_| model::obtain()).and_then(|_| setup::nextest()).map(drop)
            }
            Self::Integration => {
                model::obtain().and_then(|_| client_environment()).and_then(|_| python::environment()).map(drop)
            }
            Self::Cluster => cluster::prepare(),
            Self::Vllm => vllm::obtain().and_then(|_| setup::nextest()).map(drop),
            Self::Nixl => model::obtain().and_then(|_| Nixl::obtain()).and_then(|_| setup::nextest()).map(drop),
            Self::Candle => {
                cuda::Toolkit::obtain().and_then(|_| model::obtain()).and_then(|_| setup::nextest()).map(drop)
            }
        }
    }

    fn test(self) -> anyhow::Result<()> {
        match self {
            Self::Unit => unit(),
            Self::Integration => integration(),
            Self::Cluster => in_cluster(),
            Self::Vllm => with_vllm(),
            Self::Nixl => with_nixl(),
            Self::Candle => with_candle(),
        }
    }
}

/// Longest time `armature up` may take to end.
const DRAIN: Duration = Duration::from_secs(20);

/// Cargo features that switch on suites which need more than `cargo test`.
const SUITES: &str = "integration-tests/processes,integration-tests/cluster,integration-tests/vllm,operator/cluster";

/// Runs the stages in order; the first failure ends the run.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let all = [Stage::Unit, Stage::Integration, Stage::Cluster, Stage::Vllm, Stage::Nixl, Stage::Candle];
    let wanted = |stage: &Stage| match args.stage.is_empty() {
        true => ![Stage::Vllm, Stage::Nixl, Stage::Candle].contains(stage),
        false => args.stage.contains(stage),
    };
    let stages: Vec<_> = all.into_iter().filter(wanted).collect();
    let mut times = Vec::new();
    for stage in &stages {
        timed(format!("set-up of {}", stage.name()), &mut times, || stage.prepare())?;
    }
    // Beside what else is compiled, and not beside tests. Who names stages has not asked for it.
    let mut for_cuda = None;
    if args.stage.is_empty() {
        timed("set-up of cuda".into(), &mut times, || cuda::Check::start().map(|check| for_cuda = Some(check)))?;
    }
    let compiled = compile(&stages, &mut times);
    // Also where that failed: nothing is left running.
    let mut finish = |check: cuda::Check| timed("rest of cuda".into(), &mut times, || check.finish());
    compiled.and(for_cuda.map_or(Ok(()), &mut finish))?;
    for (what, took) in &times {
        println!("{what:<24}{:>7.1} s", took.as_secs_f64());
    }
    for stage in &stages {
        println!("\n=== {} ===", stage.name());
        timed(stage.name().into(), &mut times, || stage.test())?;
    }
    let shown: Vec<_> = times.iter().map(|(what, took)| format!("{what} {:.0} s", took.as_secs_f64())).collect();
    println!("\nall stages passed: {}", shown.join(", "));
    if args.stage.is_empty() {
        println!(
            "compiled for CUDA and not run there; not run: vllm, which installs 5 GB, nixl and candle, which need builds of their own (--stage NAME runs one)"
        );
    }
    Ok(())
}

/// What the stages run, and where the unit stage is among them its checks of the source.
fn compile(stages: &[Stage], times: &mut Vec<(String, Duration)>) -> anyhow::Result<()> {
    // NIXL's stage builds its own.
    if stages.iter().any(|stage| *stage != Stage::Nixl) {
        timed("build".into(), times, || binaries().map(drop))?;
    }
    if stages.contains(&Stage::Unit) {
        timed("checks".into(), times, checks)?;
    }
    Ok(())
}

fn timed(
    what: String,
    times: &mut Vec<(String, Duration)>,
    step: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let start = Instant::now();
    step().with_context(|| what.clone())?;
    times.push((what, start.elapsed()));
    Ok(())
}

fn checks() -> anyhow::Result<()> {
    let workspace = ["--release", "--quiet", "--workspace", "--features", SUITES];
    run_command(cargo().args(["fmt", "--all", "--check"]))?;
    run_command(cargo().arg("clippy").args(workspace).args(["--all-targets", "--", "--deny", "warnings"]))?;
    run_command(cargo().arg("doc").args(workspace).arg("--no-deps").env("RUSTDOCFLAGS", "--deny warnings"))?;
    tidy::run()?;
    alone()?;
    chart::check(&cluster::helm_binary()?)
}

fn unit() -> anyhow::Result<()> {
    run_command(&mut nextest(&["--workspace"])?)?;
    run_command(cargo().args(["test", "--release", "--quiet", "--workspace", "--doc"]))
}

/// The pure crates, each by itself: in the workspace one may live on features that another asks for. Not the API types, which
/// would compile all of Kubernetes' own once more.
fn alone() -> anyhow::Result<()> {
    for (name, _) in tidy::PURE.iter().filter(|(name, _)| *name != "crds") {
        run_command(cargo().args(["check", "--release", "--quiet", "--package", name]))?;
    }
    Ok(())
}

fn integration() -> anyhow::Result<()> {
    python::run()?;
    let (model, binary) = (model::obtain()?, binaries()?.join("armature"));
    let suites = ["--test", "up", "--test", "engines", "--test", "scale"];
    let mut processes = nextest(&[&["--workspace", "--features", SUITES][..], &suites].concat())?;
    run_command(processes.env("ARMATURE_BIN", &binary).env("ARMATURE_MODEL", &model))?;
    let served = Served::start(&binary, &model)?;
    let mut client = command(client_environment()?.join("pytest"));
    client.args(["--quiet", "-p", "no:cacheprovider", "tests/openai_client"]).env("PYTHONDONTWRITEBYTECODE", "1");
    run_command(client.env("ARMATURE_BASE_URL", &served.base_url))
}

/// `armature up`, for tests in other languages. Ended when dropped, as a terminal would end it, so that it cleans up.
struct Served {
    process: Child,
    base_url: String,
}

impl Served {
    fn start(binary: &Path, model: &Path) -> anyhow::Result<Self> {
        let mut up = command(binary);
        up.args(["up", "--port", "0", "--model"]).arg(model).stdout(Stdio::piped()).stdin(Stdio::null());
        let mut process = up.spawn()?;
        let output = BufReader::new(process.stdout.take().context("piped")?);
        let mut served = Self { process, base_url: String::new() };
        // The last line says that all is ready; `up` itself gives up when it takes too long.
        for line in output.lines() {
            let line = line?;
            if line.starts_with("try ") {
                let url =
                    line.split_whitespace().find(|word| word.starts_with("http://")).context("no URL in the line")?;
                served.base_url = url.trim_end_matches("/chat/completions").to_owned();
                return Ok(served);
            }
        }
        bail!("`armature up` ended: {}", served.process.wait()?)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let asked = succeeds(command("sh").args(["-c", &format!("kill -TERM {}", self.process.id())]));
        let deadline = Instant::now() + DRAIN;
        while asked && Instant::now() < deadline && matches!(self.process.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(50));
        }
        // One that has ended by itself is as good.
        let _ = self.process.kill().and_then(|()| self.process.wait());
    }
}

/// The cluster goes down whether or not the tests pass; its logs are shown by the tests that fail.
fn in_cluster() -> anyhow::Result<()> {
    let (model, bin) = (model::obtain()?, binaries()?);
    let tar = target().join("armature-test-image.tar");
    image::product(&bin.join("armature"), image::NAME, &tar)?;
    // Compiled before the cluster runs: its namespaces have no network to the outside, and the machine few cores.
    // These two alone: other tests were built without the suites' features, and would be built again.
    let suites = ["--workspace", "--features", SUITES, "--test", "apiserver", "--test", "cluster", "--no-run"];
    run_command(&mut nextest(&suites)?)?;
    cluster::down()?;
    // One that fails to start is ended, too.
    let tested = cluster::up(2).and_then(|()| cluster::load_image(&tar)).and_then(|()| {
        run_command(cluster::inside()?.arg(setup::nextest()?).args(NEXTEST).args([
            "--offline",
            "--workspace",
            "--features",
            SUITES,
            "--test",
            "apiserver",
        ]))?;
        let mut suite = nextest(&["--workspace", "--features", SUITES, "--test", "cluster"])?;
        // Not our own path: the build above may have replaced the file that we run from.
        run_command(suite.env("ARMATURE_MODEL", model).env("ARMATURE_XTASK", bin.join("xtask")))
    });
    let ended = cluster::down();
    tested.and(ended)
}

fn with_vllm() -> anyhow::Result<()> {
    if !vllm::has_two_cores() {
        bail!("two servers need a core each, and taskset to be bound to it");
    }
    let (installed, binary) = (vllm::obtain()?, binaries()?.join("armature"));
    let mut suite = nextest(&["--workspace", "--features", SUITES, "--test", "vllm"])?;
    suite.env("ARMATURE_BIN", binary).env("ARMATURE_VLLM", installed.program);
    run_command(suite.env("ARMATURE_VLLM_MODEL", installed.model))
}

/// The binary goes to a folder of its own: nobody should find it in place of the usual one.
fn with_nixl() -> anyhow::Result<()> {
    let (nixl, features) = (Nixl::obtain()?, [SUITES, nixl::FEATURES].join(","));
    let workspace = ["--workspace", "--features", &features];
    let lints = ["--all-targets", "--", "--deny", "warnings"];
    run_command(nixl.to(cargo().args(["clippy", "--release", "--quiet"]).args(workspace).args(lints)))?;
    run_command(nixl.to(cargo().args(["build", "--release", "--quiet", "--bin", "armature"]).args(workspace)))?;
    let folder = target().join("nixl");
    std::fs::create_dir_all(&folder)?;
    let binary = folder.join("armature");
    std::fs::copy(target().join("release/armature"), &binary)?;
    let tests = "package(worker-agent) & test(transfer::) | binary(up) & test(disaggregated)";
    let mut suite = nextest(&[&workspace[..], &["--lib", "--test", "up", "--filterset", tests]].concat())?;
    suite.env("ARMATURE_BIN", &binary).env("ARMATURE_MODEL", model::obtain()?);
    run_command(nixl.to(&mut suite))
}

/// The worker's tests that have to do with candle: on the processor, then compiled for CUDA, then on what GPUs there are.
fn with_candle() -> anyhow::Result<()> {
    const TESTS: [&str; 4] = ["--package", "worker-agent", "--filterset", "test(candle) | test(compute)"];
    let mut clippy = cargo();
    clippy.args(["clippy", "--release", "--quiet", "--package", "worker-agent", "--features", "candle"]);
    run_command(clippy.args(["--all-targets", "--", "--deny", "warnings"]))?;
    run_command(nextest(&TESTS)?.args(["--features", "candle"]))?;
    cuda::run()?;
    let toolkit = cuda::Toolkit::obtain()?;
    if toolkit.can_run() {
        return run_command(toolkit.uses(nextest(&TESTS)?)?.args(["--features", "cuda"]));
    }
    println!("candle: compiled for CUDA and not run there, for want of a GPU or of CUDA's libraries");
    Ok(())
}

/// How the test runner is called; its profile is in .config/nextest.toml.
const NEXTEST: [&str; 4] = ["nextest", "run", "--release", "--cargo-quiet"];

fn nextest(selection: &[&str]) -> anyhow::Result<std::process::Command> {
    let mut nextest = command(setup::nextest()?);
    // Errors say what went wrong without a stack of their own; panics keep theirs.
    nextest.args(NEXTEST).args(selection).env("RUST_LIB_BACKTRACE", "0");
    Ok(nextest)
}

fn client_environment() -> anyhow::Result<PathBuf> {
    let list = std::fs::read_to_string(root().join("tests/openai_client/requirements.txt"))?;
    setup::python("openai-client", &list.lines().filter(|line| !line.trim().is_empty()).collect::<Vec<_>>())
}
