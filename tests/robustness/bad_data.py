"""Bad data: missing, empty, damaged or of another kind than the model needs."""

from workspace import after, bad, broken_image, file, image_folder, one_class, text, vit, write_tokens

NOT_UTF8 = b"good line\nbad \xff\xfe line\n" * 20
PAIR = {"context": 16, "vocab_size": 257, "end_of_text": 3}
VALIDATION = {"type": "perplexity", "data": {"kind": "megatron", "path": "{folder}/pair", **PAIR}}


def tokens(**options):
    """A new training run of a language model on a .bin/.idx pair."""
    return after(write_tokens, text("megatron", "{folder}/pair", **options))


BAD_DATA = {
    "file that is not an image": bad(after(broken_image, image_folder()), "0.png", notice="images of 2 classes"),
    "folder of one class": bad(
        after(one_class, image_folder()), "config.num_classes=1", "'cat'", notice="images of 1 classes"
    ),
    "preprocessing of 5000 ops": bad(vit("input.pp=" + "|".join(["flip_lr"] * 5000)), "preprocessing"),
    "text that is not UTF-8": bad(
        after(file("a.txt", NOT_UTF8), text("text", "{folder}/a.txt")), "a.txt:2: not UTF-8", "byte 5"
    ),
    "text shorter than a batch": bad(
        after(file("a.txt", "short"), text("text", "{folder}/a.txt")), "1 examples", "batch of 8"
    ),
    "tokens beyond the vocabulary in a later row": bad(tokens(vocab_size=190), "token 190", starts=True),
    "tokens of an unknown vocabulary": bad(tokens(vocab_size=None), "config.input.data.vocab_size"),
    "damaged records": bad(
        after(file("a.tfrecord", b"\1" * 40), text("input_ids", "{folder}/a.tfrecord", vocab_size=257)),
        "a.tfrecord",
        "damaged",
        "record 0",
        notice="records",
    ),
    "evaluation data with another end of text": bad(
        after(
            write_tokens,
            after(
                file("a.txt", "text " * 99),
                text("text", "{folder}/a.txt", f"evals={ {'validation': VALIDATION} }"),
            ),
        ),
        "3",
        "256",
    ),
}
