//! The engine: whatever comes in, and in whatever order, each sequence gets the tokens that it gets alone,
//! blocks are conserved, and every request ends.

mod common;

use common::*;
use proptest::prelude::*;
use qwen_rs::cache::{BlockPool, KvCache, KvShape};
use qwen_rs::engine::{Clock, Engine, Event, Limits, Outcome, Request, Store};
use qwen_rs::kernels::Isa;
use qwen_rs::linear::WeightDtype;
use qwen_rs::model::Model;
use qwen_rs::sampler::{Sampler, SamplerConfig};
use qwen_rs::tensor::{KvDtype, Rows, Tensor};
use qwen_rs::threads::Threads;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

const BLOCK_ROWS: usize = 4;

/// Passes that take any time at all: what they seem to take decides how prompts are cut.
struct Jumps(AtomicU64, u64);

impl Clock for Jumps {
    fn now(&self) -> Duration {
        let n = self.0.fetch_add(1, Ordering::Relaxed);
        Duration::from_micros(n * (n.wrapping_mul(self.1) % 7000))
    }
}

static MODEL: LazyLock<Arc<Model>> =
    LazyLock::new(|| Arc::new(simd("gqa_4_1", WeightDtype::F32, Isa::from_environment().unwrap(), 2)));

fn engine(blocks: usize, max_num_seqs: usize, jumps: u64) -> (Engine, Arc<BlockPool>) {
    let pool = BlockPool::new(MODEL.config().kv_shape(), KvDtype::F32, BLOCK_ROWS, blocks).unwrap();
    let limits = Limits { max_num_seqs, step_goal: Some(Duration::from_millis(5)) };
    let clock = Box::new(Jumps(AtomicU64::new(0), jumps));
    (Engine::new(MODEL.clone(), Store::shared(pool.clone()), limits, clock).unwrap(), pool)
}

fn request(prompt: Vec<u32>, max_tokens: usize, seed: u64) -> Request {
    let temperature = if seed.is_multiple_of(3) { 0.0 } else { 1.0 };
    let penalty = if seed.is_multiple_of(2) { 1.0 } else { 1.3 };
    Request {
        prompt,
        max_tokens,
        sampling: SamplerConfig {
            temperature,
            repetition_penalty: penalty,
            seed,
            ..SamplerConfig::default()
        },
        logit_bias: if seed.is_multiple_of(5) { vec![(1, 2.5), (7, -1.0)] } else { Vec::new() },
        ends: Vec::new(),
        logprobs: seed.is_multiple_of(4).then_some(2),
        prompt_logprobs: None,
        salt: String::new(),
        priority: 0,
        constrained: false,
    }
}

type Told = (Vec<u32>, Vec<Vec<(u32, u64)>>);

/// What a request gives alone, by the calls of the model itself.
fn alone(request: &Request) -> Told {
    let model = &*MODEL;
    let mut cache = model.basic_cache(KvDtype::F32);
    let mut logits = prefill(model, &mut cache, &request.prompt);
    let mut sampler = Sampler::new(request.sampling, &request.prompt, Isa::from_environment().unwrap())
        .unwrap()
        .with_bias(request.logit_bias.clone());
    let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
    loop {
        let token = sampler.sample(&logits).unwrap();
        tokens.push(token);
        logprobs.push(told(
            &request
                .logprobs
                .map_or(Vec::new(), |count| qwen_rs::sampler::log_probabilities(&logits, token, count)),
        ));
        if tokens.len() == request.max_tokens || request.ends.contains(&token) {
            return (tokens, logprobs);
        }
        logits = decode(model, &mut cache, token);
    }
}

fn told(logprobs: &[(u32, f64)]) -> Vec<(u32, u64)> {
    logprobs.iter().map(|&(token, value)| (token, value.to_bits())).collect()
}

/// Takes in events; returns who ended.
fn take(events: Vec<Event>, results: &mut BTreeMap<u64, Told>) -> Vec<u64> {
    let mut ended = Vec::new();
    for Event { id, outcome } in events {
        match outcome {
            Outcome::Token { token, logprobs, last, .. } => {
                let result = results.entry(id).or_default();
                result.0.push(token);
                result.1.push(told(&logprobs));
                if last {
                    ended.push(id);
                }
            }
            Outcome::PromptLogprobs(_) => {}
            Outcome::Failed(error) => panic!("{id}: {error}"),
        }
    }
    ended
}

fn step(engine: &Engine) -> Vec<Event> {
    engine.step(Duration::ZERO, &|| false).unwrap()
}

#[derive(Clone, Debug)]
enum Act {
    Submit { common: usize, own: usize, max_tokens: usize, seed: u64, priority: i32, salt: bool },
    Cancel(usize),
    Steps(usize),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (0usize..30, 1usize..12, 1usize..12, 0u64..40, -1i32..2, any::<bool>()).prop_map(
            |(common, own, max_tokens, seed, priority, salt)| Act::Submit {
                common,
                own,
                max_tokens,
                seed,
                priority,
                salt
            }
        ),
        1 => (0usize..20).prop_map(Act::Cancel),
        3 => (1usize..6).prop_map(Act::Steps),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn whatever_comes_in_each_gets_what_it_gets_alone(
        acts in prop::collection::vec(act(), 1..40),
        blocks in 14usize..40,
        max_num_seqs in 1usize..9,
        jumps in 1u64..1000,
    ) {
        let (engine, pool) = engine(blocks, max_num_seqs, jumps);
        let shared = tokens(&MODEL, 30, 77);
        let mut requests = BTreeMap::new();
        let mut results = BTreeMap::new();
        let mut open = std::collections::BTreeSet::new();
        let conserved = |engine: &Engine| {
            let counters = engine.counters();
            assert_eq!(counters.blocks, blocks);
            assert!(counters.free_blocks + counters.cached_blocks <= blocks);
            assert_eq!(counters.free_blocks, pool.free_blocks());
        };
        for act in acts {
            match act {
                Act::Submit { common, own, max_tokens, seed, priority, salt } => {
                    let prompt = [&shared[..common], &tokens(&MODEL, own, seed)].concat();
                    let mut request = request(prompt, max_tokens, seed);
                    request.priority = priority;
                    request.salt = if salt { "salt".into() } else { String::new() };
                    let id = engine.submit(request.clone()).unwrap();
                    requests.insert(id, request);
                    open.insert(id);
                }
                Act::Cancel(nth) => {
                    if let Some(&id) = open.iter().nth(nth) {
                        engine.cancel(id);
                        open.remove(&id);
                        requests.remove(&id);
                    }
                }
                Act::Steps(count) => {
                    for _ in 0..count {
                        for id in take(step(&engine), &mut results) {
                            open.remove(&id);
                        }
                        conserved(&engine);
                    }
                }
            }
        }
        let mut steps = 0;
        while !open.is_empty() {
            for id in take(step(&engine), &mut results) {
                open.remove(&id);
            }
            conserved(&engine);
            steps += 1;
            prop_assert!(steps < 5000, "{} requests do not end", open.len());
        }
        step(&engine); // takes in what was cancelled last
        let counters = engine.counters();
        prop_assert_eq!(counters.free_blocks + counters.cached_blocks, blocks);
        prop_assert_eq!((counters.running, counters.waiting), (0, 0));
        for (id, request) in requests {
            prop_assert_eq!(&results[&id], &alone(&request));
        }
    }
}

/// Runs requests to their ends, all submitted at once.
fn together(engine: &Engine, requests: &[Request]) -> Vec<Told> {
    let ids: Vec<u64> = requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
    let mut results = BTreeMap::new();
    let mut left = ids.len();
    while left > 0 {
        left -= take(step(engine), &mut results).len();
    }
    ids.iter().map(|id| results.remove(id).unwrap()).collect()
}

#[test]
fn a_pool_that_is_too_small_for_all_preempts_and_every_one_gets_what_it_gets_alone() {
    let (engine, _) = engine(16, 8, 3);
    let requests: Vec<_> = (0..8).map(|i| request(tokens(&MODEL, 6, i), 40, i)).collect();
    let results = together(&engine, &requests);
    assert!(engine.counters().preemptions > 0);
    for (result, request) in results.iter().zip(&requests) {
        assert_eq!(result, &alone(request));
    }
}

#[test]
fn prompts_that_begin_alike_are_computed_once() {
    let (engine, _) = engine(200, 8, 3);
    let shared = tokens(&MODEL, 43, 5);
    let requests: Vec<_> =
        (0..6).map(|i| request([&shared[..], &tokens(&MODEL, 3, 100 + i)].concat(), 4, i)).collect();
    let results = together(&engine, &requests);
    for (result, request) in results.iter().zip(&requests) {
        assert_eq!(result, &alone(request));
    }
    // Five find the ten full blocks that the first has computed.
    let counters = engine.counters();
    assert!(counters.cached_tokens >= 5 * 40, "{counters:?}");
    assert_eq!(counters.prompt_tokens + counters.cached_tokens, 6 * 46);
    assert_eq!(counters.generated_tokens, 6 * 4);
    // And what a sequence said is found again, into its last block.
    let told = [&requests[0].prompt[..], &results[0].0[..]].concat();
    let before = engine.counters().cached_tokens;
    let next = request([&told[..], &[9, 9]].concat(), 3, 4);
    assert_eq!(together(&engine, std::slice::from_ref(&next))[0], alone(&next));
    assert_eq!(engine.counters().cached_tokens - before, told.len() as u64 - 1);
}

#[test]
fn two_salts_share_nothing() {
    let (engine, _) = engine(200, 8, 3);
    let prompt = tokens(&MODEL, 40, 5);
    for salt in ["a", "b"] {
        let mut request = request(prompt.clone(), 2, 0);
        request.salt = salt.into();
        together(&engine, std::slice::from_ref(&request));
        assert_eq!(engine.counters().cached_tokens, 0);
    }
}

#[test]
fn a_request_that_can_never_fit_is_refused_with_both_numbers() {
    let (engine, _) = engine(11, 8, 3);
    let error = engine.submit(request(tokens(&MODEL, 30, 1), 12, 0)).unwrap_err();
    assert_eq!(error.to_string(), "the request needs room for 41 tokens, and the KV cache has 40");
    assert_eq!(together(&engine, &[request(tokens(&MODEL, 30, 1), 11, 0)])[0].0.len(), 11);
}

#[test]
fn a_cancelled_prompt_stops_in_the_middle_of_its_pass() {
    let (engine, pool) = engine(400, 8, 3);
    let id = engine.submit(request(tokens(&MODEL, 200, 1), 5, 0)).unwrap();
    let asked = AtomicU64::new(0);
    let interrupt = || {
        if asked.fetch_add(1, Ordering::Relaxed) == 1 {
            engine.cancel(id);
        }
        false
    };
    assert!(engine.step(Duration::ZERO, &interrupt).unwrap().is_empty());
    assert!(asked.load(Ordering::Relaxed) >= 2);
    assert!(step(&engine).is_empty());
    let counters = engine.counters();
    assert_eq!((counters.running, counters.waiting, pool.free_blocks()), (0, 0, 400));
}

#[test]
fn prompt_logprobs_are_of_rows_that_were_computed() {
    let (engine, _) = engine(400, 8, 3);
    let prompt = tokens(&MODEL, 90, 1);
    together(&engine, &[request(prompt.clone(), 1, 0)]);
    let mut asking = request(prompt.clone(), 1, 0);
    asking.prompt_logprobs = Some(1);
    engine.submit(asking).unwrap();
    let told = loop {
        let found = step(&engine).into_iter().find_map(|event| match event.outcome {
            Outcome::PromptLogprobs(told) => Some(told),
            _ => None,
        });
        if let Some(told) = found {
            break told;
        }
    };
    let vocab = MODEL.config().vocab_size;
    let mut cache = MODEL.basic_cache(KvDtype::F32);
    let logits = prefill_all(&MODEL, &mut cache, &prompt);
    assert_eq!(cache.seq_len(), 90);
    let expected: Vec<_> = (0..89)
        .map(|r| qwen_rs::sampler::log_probabilities(&logits[r * vocab..][..vocab], prompt[r + 1], 1))
        .collect();
    assert_eq!(told, expected);
}

#[test]
fn a_constrained_sequence_waits_for_what_is_allowed() {
    let (engine, _) = engine(40, 8, 3);
    let mut constrained = request(tokens(&MODEL, 9, 1), 2, 0);
    constrained.constrained = true;
    let id = engine.submit(constrained).unwrap();
    let mut results = BTreeMap::new();
    for _ in 0..5 {
        take(step(&engine), &mut results);
    }
    assert!(results.is_empty());
    for allowed in [17u32, 3] {
        let mut mask = vec![0u32; MODEL.config().vocab_size.div_ceil(32)];
        mask[allowed as usize / 32] |= 1 << (allowed % 32);
        engine.allow(id, mask);
        take(step(&engine), &mut results);
        take(step(&engine), &mut results);
    }
    assert_eq!(results[&id].0, [17, 3]);
}

/// Steps until somebody ends, with an interrupt that looks at each of a pass's layers.
fn steps_until_the_end(engine: &Engine, interrupt: &(dyn Fn() -> bool + Sync), most: usize) -> Told {
    let mut results = BTreeMap::new();
    for _ in 0..most {
        if let Some(id) = take(engine.step(Duration::ZERO, interrupt).unwrap(), &mut results).first() {
            return results.remove(id).unwrap();
        }
    }
    panic!("nobody ends");
}

#[test]
fn cancelling_others_does_not_stop_a_prompt() {
    // One that runs alone, while those that wait or have ended are cancelled at every layer.
    let (engine, _) = engine(400, 1, 3);
    let long = request(tokens(&MODEL, 200, 1), 2, 0);
    engine.submit(long.clone()).unwrap();
    let interrupt = || {
        let waits = engine.submit(request(tokens(&MODEL, 9, 2), 2, 0)).unwrap();
        engine.cancel(waits);
        engine.cancel(u64::MAX);
        false
    };
    assert_eq!(steps_until_the_end(&engine, &interrupt, 100), alone(&long));
}

#[test]
fn a_prompt_comes_to_its_end_whoever_is_cancelled_beside_it() {
    // In every pass there is somebody who is cancelled in it.
    let (engine, _) = engine(400, 8, 3);
    let long = request(tokens(&MODEL, 200, 1), 1, 0);
    let id = engine.submit(long.clone()).unwrap();
    let mut results = BTreeMap::new();
    for round in 0..200 {
        let beside = engine.submit(request(tokens(&MODEL, 3, round), 2, 0)).unwrap();
        let interrupt = || {
            engine.cancel(beside);
            false
        };
        let ended = take(engine.step(Duration::ZERO, &interrupt).unwrap(), &mut results);
        if ended.contains(&id) {
            assert_eq!(results[&id], alone(&long));
            return;
        }
    }
    panic!("it does not end");
}

#[test]
fn who_waits_is_counted_while_a_pass_runs() {
    let (engine, _) = engine(400, 1, 3);
    for i in 0..5 {
        engine.submit(request(tokens(&MODEL, 30, i), 2, 0)).unwrap();
    }
    let seen = std::sync::Mutex::new(Vec::new());
    let interrupt = || {
        let counters = engine.counters();
        seen.lock().unwrap().push((counters.running, counters.waiting));
        false
    };
    assert_eq!(engine.counters().waiting, 5);
    engine.step(Duration::ZERO, &interrupt).unwrap();
    let seen = seen.into_inner().unwrap();
    assert!(!seen.is_empty() && seen.iter().all(|&counts| counts == (1, 4)), "{seen:?}");
}

/// A cache that gets no memory for its prompt, if it is to fail.
struct Failing(qwen_rs::cache::BasicKvCache, bool, Arc<AtomicU64>);

impl KvCache for Failing {
    fn reserve(&mut self, rows: usize) -> qwen_rs::error::Result<()> {
        if self.1 {
            self.2.fetch_add(1, Ordering::Relaxed);
            return Err(qwen_rs::error::Error::cache("no memory"));
        }
        self.0.reserve(rows)
    }
    fn set_prefill(
        &mut self,
        layer: usize,
        k: Rows<'_>,
        v: Rows<'_>,
        threads: Option<&Threads>,
    ) -> qwen_rs::error::Result<()> {
        self.0.set_prefill(layer, k, v, threads)
    }
    fn push_rows(
        &mut self,
        layer: usize,
        k: Rows<'_>,
        v: Rows<'_>,
        threads: Option<&Threads>,
    ) -> qwen_rs::error::Result<()> {
        self.0.push_rows(layer, k, v, threads)
    }
    fn materialize(&self, layer: usize) -> qwen_rs::error::Result<(Tensor, Tensor)> {
        self.0.materialize(layer)
    }
    fn seq_len(&self) -> usize {
        self.0.seq_len()
    }
    fn num_layers(&self) -> usize {
        self.0.num_layers()
    }
    fn shape(&self) -> KvShape {
        self.0.shape()
    }
    fn dtype(&self) -> KvDtype {
        self.0.dtype()
    }
    fn truncate(&mut self, rows: usize) {
        self.0.truncate(rows);
    }
    fn kv_bytes(&self) -> usize {
        self.0.kv_bytes()
    }
    fn name(&self) -> &'static str {
        self.0.name()
    }
}

#[test]
fn an_interrupt_after_one_has_failed_loses_nobodys_token() {
    // Of three prompts in a pass the second fails, so each runs alone; the third is interrupted then.
    let failures = Arc::new(AtomicU64::new(0));
    let (count, made) = (failures.clone(), AtomicU64::new(0));
    let new = move || -> Box<dyn KvCache> {
        let second = made.fetch_add(1, Ordering::Relaxed) == 1;
        Box::new(Failing(MODEL.basic_cache(KvDtype::F32), second, count.clone()))
    };
    let limits = Limits { max_num_seqs: 8, step_goal: None };
    let clock = Box::new(Jumps(AtomicU64::new(0), 3));
    let engine = Engine::new(MODEL.clone(), Store::Own(Box::new(new)), limits, clock).unwrap();
    let requests: Vec<_> = (0..3).map(|i| request(tokens(&MODEL, 5, i), 1, i)).collect();
    let ids: Vec<_> = requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
    let told = engine.step(Duration::ZERO, &|| failures.load(Ordering::Relaxed) >= 2).unwrap();
    let mut results = BTreeMap::new();
    let (failed, rest): (Vec<_>, Vec<_>) =
        told.into_iter().partition(|event| matches!(event.outcome, Outcome::Failed(_)));
    assert_eq!(failed.iter().map(|event| event.id).collect::<Vec<_>>(), [ids[1]]);
    assert_eq!(take(rest, &mut results), [ids[0]]);
    assert_eq!(take(step(&engine), &mut results), [ids[2]]);
    for at in [0, 2] {
        assert_eq!(results[&ids[at]], alone(&requests[at]));
    }
}

#[test]
fn who_was_cancelled_is_counted_while_the_engine_waits_for_work() {
    let (engine, pool) = engine(400, 8, 3);
    let id = engine.submit(request(tokens(&MODEL, 20, 1), 50, 0)).unwrap();
    step(&engine);
    assert_eq!(engine.counters().running, 1);
    engine.cancel(id);
    std::thread::scope(|scope| {
        scope.spawn(|| engine.step(Duration::from_secs(60), &|| false).unwrap());
        while engine.counters().running > 0
            || engine.counters().free_blocks + engine.counters().cached_blocks < 400
        {
            std::thread::yield_now();
        }
        engine.wake();
    });
    assert!(pool.free_blocks() < 400); // what it had computed is kept for others
}
