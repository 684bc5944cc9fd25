//! Scratch.
use router::model::tokenizer::{Tokenizer, reference};
use router::model::tokenizer_json::TokenizerJson;
use router::model::{bpe::Bpe, vocabulary::Vocabulary};
use std::sync::Arc;
use std::time::Instant;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let json = std::fs::read(&args[1]).unwrap();
    let t = Instant::now();
    let file = TokenizerJson::parse(&json).unwrap();
    let t1 = t.elapsed();
    let vocabulary = Arc::new(Vocabulary::new(&file).unwrap());
    let t2 = t.elapsed();
    let own = Bpe::new(&file, &vocabulary).unwrap();
    let t3 = t.elapsed();
    drop(file);
    let r = reference(&json).unwrap();
    println!("parse {t1:?} vocabulary {:?} bpe {:?} reference {:?}", t2 - t1, t3 - t2, t.elapsed() - t3);
    let (mut tokens, mut bytes, mut diffs, mut chunks) = (0usize, 0usize, 0usize, 0usize);
    let (mut to, mut tr) = (0f64, 0f64);
    for path in &args[2..] {
        let text = String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
        let mut rest = &text[..];
        while !rest.is_empty() {
            let cut = rest.ceil_char_boundary(rest.len().min(20_000));
            let (head, tail) = rest.split_at(cut);
            rest = tail;
            let (mut a, mut b) = (vec![], vec![]);
            let t = Instant::now();
            own.encode(head, &mut a).unwrap();
            to += t.elapsed().as_secs_f64();
            let t = Instant::now();
            r.encode(head, &mut b).unwrap();
            tr += t.elapsed().as_secs_f64();
            chunks += 1;
            tokens += b.len();
            bytes += head.len();
            if a != b {
                diffs += 1;
                let at = a.iter().zip(&b).position(|(x, y)| x != y);
                println!("DIFF {path} at {at:?} {:?}", at.map(|i| vocabulary.text(&b[i.saturating_sub(3)..(i + 5).min(b.len())])));
            }
        }
    }
    println!("{}: {bytes} bytes, {tokens} tokens, {chunks} chunks, {diffs} differences; own {:.1} MB/s reference {:.1} MB/s", args[1], bytes as f64 / to / 1e6, bytes as f64 / tr / 1e6);
    let text = std::fs::read_to_string(&args[2]).unwrap();
    let text = &text[..text.ceil_char_boundary(1024)];
    let fresh = || { let f = TokenizerJson::parse(&json).unwrap(); Bpe::new(&f, &Arc::new(Vocabulary::new(&f).unwrap())).unwrap() };
    let cold = fresh();
    let mut out = Vec::with_capacity(1024);
    let t = Instant::now();
    cold.encode(text, &mut out).unwrap();
    let cold_us = t.elapsed().as_secs_f64() * 1e6;
    let n = 20000;
    let t = Instant::now();
    for _ in 0..n { out.clear(); own.encode(std::hint::black_box(text), &mut out).unwrap(); }
    println!("1 KB ({} tokens): cold {cold_us:.1} us, warm {:.2} us", out.len(), t.elapsed().as_secs_f64() * 1e6 / n as f64);
    for part in ["a", " ", "ab"] {
        let long = part.repeat(100_000);
        let t = Instant::now();
        out.clear();
        own.encode(&long, &mut out).unwrap();
        println!("{} x {part:?}: {:?}", 100_000, t.elapsed());
    }
}
