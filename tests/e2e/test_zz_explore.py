import shutil, pytest, torch
from transformers import AutoConfig, AutoModelForCausalLM
from main_runs import FULLY_ASYNC, run_main, small
from test_fully_async import DECOUPLED
from recipe.async_engine.task import TaskPaths
base=dict(hidden_size=64,intermediate_size=128,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=2,max_position_embeddings=512,initializer_range=0.05,tie_word_embeddings=False)
G=dict(n_routed_experts=8,num_experts_per_tok=2,moe_intermediate_size=64,n_group=2,topk_group=1,first_k_dense_replace=1,head_dim=32)
K={
 "mixtral":dict(num_local_experts=8,num_experts_per_tok=2,head_dim=32),
 "qwen2_moe":dict(num_experts=8,num_experts_per_tok=2,moe_intermediate_size=64,shared_expert_intermediate_size=64),
 "olmoe":dict(num_experts=8,num_experts_per_tok=2),
 "glm4_moe":G,
 "gpt_oss":dict(num_local_experts=8,num_experts_per_tok=2,head_dim=32),
 "deepseek_v3":G|dict(head_dim=16,q_lora_rank=32,kv_lora_rank=32,qk_rope_head_dim=16,qk_nope_head_dim=16,v_head_dim=32),
}
@pytest.mark.parametrize("family",list(K))
def test_it(family, untrained_task, tmp_path, ray_dir):
    folder=tmp_path/"model"
    shutil.copytree(untrained_task.model, folder)
    d=AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    c=AutoConfig.for_model(family,vocab_size=d.vocab_size,bos_token_id=d.bos_token_id,eos_token_id=d.eos_token_id,pad_token_id=d.pad_token_id,**(base|K[family]))
    AutoModelForCausalLM.from_config(c,dtype=torch.float32).save_pretrained(folder)
    task=TaskPaths(model=folder,train=untrained_task.train,val=untrained_task.val,reward_file=untrained_task.reward_file)
    attn=["actor_rollout_ref.model.override_config.attn_implementation=eager"] if family=="gpt_oss" else []
    run=run_main(FULLY_ASYNC,[*small(task,tmp_path/"run",ray_dir),DECOUPLED,*attn,"async_training.staleness_threshold=0","async_training.timeouts.weight_sync=20","trainer.total_training_steps=3"],tmp_path/"run",timeout_s=150)
    try:
        s=run.summary
        print("RESULT",family,run.returncode,str(s["error"])[:1500],run.column("training/rollout_probs_diff_max"))
    except Exception as e:
        print("RESULT",family,run.returncode,repr(e),run.output[-1500:])
