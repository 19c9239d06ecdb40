"""Fine-tuning of a checkpoint, in the style of big_vision: half-precision momentum and a new head."""

import big_vision.configs.common as bvcc
import ml_collections as mlc


def get_config(arg=None):
    arg = bvcc.parse_arg(arg, init="howto-i21k-B/32", size=(384, int), lr=0.01, fsdp=False)
    config = mlc.ConfigDict()
    config.input = {"batch_size": 512, "shuffle_buffer_size": 50_000}
    config.input.data = dict(name="oxford_iiit_pet", split="train[:90%]")
    labels = '|value_range(-1, 1)|onehot(37, key="label", key_result="labels")|keep("image", "labels")'
    config.input.pp = f"decode|inception_crop({arg.size})|flip_lr" + labels
    config.log_training_steps = 10
    config.ckpt_percent = 0.25
    config.num_classes = 37
    config.total_steps = 500

    config.model_name = "vit"
    config.model_init = arg.init
    config.model = dict(variant="B/32", pool_type="tok")
    config.model_load = dict(dont_load=["head/kernel", "head/bias"])

    config.optax_name = "big_vision.momentum_hp"
    config.grad_clip_norm = 1.0
    config.wd = None
    config.lr = arg.lr
    config.loss = "softmax_xent"
    config.mixup = dict(p=0.0)
    config.schedule = dict(decay_type="cosine", warmup_percent=0.2)
    if arg.fsdp:
        config.mesh = [("data", -1)]
        config.sharding_strategy = [(".*", 'fsdp(axis="data")')]
        config.sharding_rules = [("act_batch", ("data",))]
        config.model.scan = True

    pp = f"decode|resize_small({arg.size * 7 // 6})|central_crop({arg.size})" + labels
    config.evals = {
        name: dict(type="classification", data=dict(name="oxford_iiit_pet", split=split), pp_fn=pp, log_percent=0.1,
                   loss_name="softmax_xent")
        for name, split in (("val", "train[90%:]"), ("test", "test"))
    }  # fmt: skip
    return config
