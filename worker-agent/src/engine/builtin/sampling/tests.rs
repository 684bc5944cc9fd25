//! Sampling on vectors small enough to compute by hand, and the statistics of seeded draws.

use super::*;

fn sampler(wire: Sampling, prompt: &[u32]) -> Sampler {
    Sampler::new(SamplingParams::new(&wire, 8, 0).expect("valid settings"), prompt)
}

fn greedy(wire: Sampling, prompt: &[u32], row: &[f32]) -> u32 {
    sampler(wire, prompt).sample(&mut row.to_vec(), &[], prompt.len()).expect("usable logits")
}

/// Logits whose softmax is `p`.
fn logits(p: &[f32]) -> Vec<f32> {
    p.iter().map(|p| p.ln()).collect()
}

fn kept(p: &[f32], narrow: impl FnOnce(&mut Candidates)) -> Vec<u32> {
    let mut candidates = Candidates::softmax(&logits(p), 1.0).expect("usable logits");
    narrow(&mut candidates);
    candidates.tokens()
}

#[test]
fn greedy_takes_the_first_of_the_largest_and_skips_nan() {
    assert_eq!(greedy(Sampling::default(), &[], &[0.5, f32::NAN, 2.0, 2.0]), 2);
    assert_eq!(greedy(Sampling::default(), &[], &[f32::NEG_INFINITY, -3.0, f32::NAN]), 1);
    assert_eq!(greedy(Sampling::default(), &[], &[1.0, f32::INFINITY]), 1);
    let mut none = sampler(Sampling::default(), &[]);
    assert_eq!(none.sample(&mut [f32::NAN, f32::NEG_INFINITY], &[], 0), Err(NoUsableLogit));
    let mut drawing = sampler(Sampling { temperature: 1.0, ..Default::default() }, &[]);
    assert_eq!(drawing.sample(&mut [f32::NAN, f32::NEG_INFINITY], &[], 0), Err(NoUsableLogit));
    assert_eq!(drawing.sample(&mut [f32::NAN, 0.0], &[], 0), Ok(1));
}

#[test]
fn a_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() {
    let wire = Sampling { repetition_penalty: 2.0, ..Default::default() };
    let mut sampler = sampler(wire, &[0, 1]);
    let mut row = [3.0, -1.0, 1.6, -1.5];
    assert_eq!(sampler.sample(&mut row, &[], 2), Ok(2));
    assert_eq!(row, [1.5, -2.0, 1.6, -1.5]);
    let mut row = [3.0, -1.0, 1.6, -1.5];
    assert_eq!(sampler.sample(&mut row, &[], 3), Ok(0), "token 2 is output now, and counts too");
    assert_eq!(row, [1.5, -2.0, 0.8, -1.5]);
}

#[test]
fn presence_and_frequency_count_the_output_alone() {
    let wire = Sampling { presence_penalty: 0.5, frequency_penalty: 0.25, ..Default::default() };
    let mut sampler = sampler(wire, &[0]);
    for _ in 0..2 {
        assert_eq!(sampler.sample(&mut [0.0, 4.0, 0.0], &[], 1), Ok(1));
    }
    let mut row = [1.0, 1.0, 0.0];
    assert_eq!(sampler.sample(&mut row, &[], 3), Ok(0));
    assert_eq!(row, [1.0, 0.0, 0.0], "1 - 2 x 0.25 - 0.5; the prompt's token is not penalised");
}

#[test]
fn bias_and_mask_act_before_the_choice() {
    let wire = Sampling { logit_bias: [(1, 5.0), (2, -100.0)].into(), ..Default::default() };
    assert_eq!(greedy(wire.clone(), &[], &[2.0, 0.0, 50.0]), 1);
    let masked = sampler(wire, &[]).sample(&mut [2.0, 0.0, 50.0], &[1, 999], 0);
    assert_eq!(masked, Ok(0));
}

#[test]
fn filters_keep_what_their_definitions_say() {
    let p = [0.1, 0.4, 0.2, 0.3];
    assert_eq!(kept(&p, |c| c.top_k(2)), [1, 3]);
    assert_eq!(kept(&p, |c| c.top_p(0.39)), [1]);
    assert_eq!(kept(&p, |c| c.top_p(0.41)), [1, 3]);
    assert_eq!(kept(&p, |c| c.top_p(0.95)), [0, 1, 2, 3]);
    assert_eq!(kept(&p, |c| c.min_p(0.45)), [1, 2, 3], "at least 0.45 of 0.4");
    // top_p is a share of what top_k left: of 0.4 and 0.3, the first is 57 %.
    let both = |c: &mut Candidates, p| {
        c.top_k(2);
        c.top_p(p);
    };
    assert_eq!(kept(&p, |c| both(c, 0.55)), [1]);
    assert_eq!(kept(&p, |c| both(c, 0.6)), [1, 3]);
    assert_eq!(kept(&[0.25; 4], |c| c.top_k(2)), [0, 1], "ties go to the smaller token");
}

#[test]
fn top_p_looks_further_when_the_best_tokens_do_not_suffice() {
    let flat = vec![1.0 / 1000.0; 1000];
    let tokens = kept(&flat, |c| c.top_p(0.7));
    assert!((699..=701).contains(&tokens.len()), "{} tokens", tokens.len());
    assert_eq!(tokens[tokens.len() - 1] as usize, tokens.len() - 1);
}

#[test]
fn draws_follow_the_distribution() {
    let p = [0.1, 0.2, 0.3, 0.4];
    let wire = Sampling { temperature: 1.0, seed: Some(7), ..Default::default() };
    let mut sampler = sampler(wire, &[]);
    let mut counts = [0u32; 4];
    const DRAWS: usize = 20_000;
    for position in 0..DRAWS {
        counts[sampler.sample(&mut logits(&p), &[], position).expect("usable logits") as usize] += 1;
    }
    // Chi-squared with 3 degrees of freedom: above 16.27 in one case of a thousand; the seed is fixed.
    let chi: f64 = counts
        .iter()
        .zip(p)
        .map(|(&n, p)| {
            let expected = f64::from(p) * DRAWS as f64;
            (f64::from(n) - expected).powi(2) / expected
        })
        .sum();
    assert!(chi < 16.27, "chi-squared {chi}, counts {counts:?}");
}

#[test]
fn temperature_sharpens_and_flattens() {
    // At temperature 0.5 probabilities are squared: 0.2 : 0.8 becomes 0.04 : 0.64, so 1 in 17.
    let wire = Sampling { temperature: 0.5, seed: Some(1), ..Default::default() };
    let mut sampler = sampler(wire, &[]);
    let rare = (0..17_000).filter(|&i| sampler.sample(&mut logits(&[0.2, 0.8]), &[], i) == Ok(0)).count();
    assert!((900..1100).contains(&rare), "{rare} of an expected 1000");
}

#[test]
fn a_draw_depends_on_seed_and_position_alone() {
    let draw = |seed, position| {
        let wire = Sampling { temperature: 1.0, seed: Some(seed), ..Default::default() };
        sampler(wire, &[]).sample(&mut logits(&[0.125; 8]), &[], position).expect("usable logits")
    };
    let row = |seed| (0..32).map(|position| draw(seed, position)).collect::<Vec<_>>();
    assert_eq!(row(3), row(3));
    assert_ne!(row(3), row(4));
    // The generator's own first output for seed 0, so that a change of algorithm is noticed.
    assert_eq!(scramble(0x9e37_79b9_7f4a_7c15), 0xe220_a839_7b1d_cdaf);
}

#[test]
fn logprobs_are_those_of_the_raw_logits() {
    let got = token_logprobs(&logits(&[0.1, 0.6, 0.3]), 0, 2);
    let close = |a: f32, b: f32| (a - b.ln()).abs() < 1e-5;
    assert!(got.token_id == 0 && close(got.logprob, 0.1));
    assert_eq!(got.top.iter().map(|t| t.token_id).collect::<Vec<_>>(), [1, 2]);
    assert!(close(got.top[0].logprob, 0.6) && close(got.top[1].logprob, 0.3));
    assert_eq!(token_logprobs(&[0.0, f32::NAN], 1, 5).top.len(), 1, "NaN is no alternative");
    assert_eq!(token_logprobs(&[0.0, f32::NAN], 1, 0).logprob, f32::NEG_INFINITY);
}

#[test]
fn settings_out_of_range_are_named() {
    let invalid = |wire: Sampling| SamplingParams::new(&wire, 8, 0).expect_err("invalid").to_string();
    assert_eq!(
        invalid(Sampling { temperature: f32::NAN, ..Default::default() }),
        "temperature must be at least 0, not NaN"
    );
    assert_eq!(invalid(Sampling { top_p: 1.5, ..Default::default() }), "top_p must be in 0..1, not 1.5");
    assert!(invalid(Sampling { min_p: -0.1, ..Default::default() }).starts_with("min_p"));
    assert!(invalid(Sampling { presence_penalty: 3.0, ..Default::default() }).starts_with("presence_penalty"));
    assert!(invalid(Sampling { logit_bias: [(8, 1.0)].into(), ..Default::default() }).contains("token 8"));
    assert!(invalid(Sampling { logit_bias: [(1, f32::NAN)].into(), ..Default::default() }).starts_with("logit_bias"));
}
