"""An HTTP server for two trained models: classes of an image, and text that is sent while it is generated.

    pip install "dcvit[data]" fastapi uvicorn python-multipart
    IMAGES=runs/W TEXT=runs/text uvicorn serve:app
    curl --data-binary @tests/data/seven.png 'localhost:8000/predict?topk=3'
    curl --form image=@tests/data/seven.png 'localhost:8000/predict?topk=3'
    curl --no-buffer -G localhost:8000/generate --data-urlencode 'prompt=def main('

A request that does not fit its model is answered by one line and status 422, a damaged form by 400.
"""

import os
from typing import Annotated

import fastapi
import numpy as np
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

import dcvit
from dcvit.errors import ConfigError, InputError
from dcvit.inference.texts import TextOptions

dcvit.quiet()
app = fastapi.FastAPI()
images, text = dcvit.load(os.environ["IMAGES"]), dcvit.load(os.environ["TEXT"])
images.predict(np.zeros((64, 64, 3), np.uint8))  # compile before the first request; other lengths of text are compiled
next(text.stream("a"), None)  # when they are first asked for


@app.exception_handler(ConfigError)
@app.exception_handler(InputError)
def refuse(request: fastapi.Request, error: Exception) -> Response:
    return PlainTextResponse(f"{error}\n", status_code=422)


@app.post("/predict")
async def predict(request: fastapi.Request, topk: int = 5) -> dict[str, float]:
    image = await request.body()
    if request.headers.get("content-type", "").startswith("multipart/"):
        upload = (await request.form()).get("image")
        if upload is None or isinstance(upload, str):
            raise InputError("no file named image in the form")
        image = await upload.read()
    (classes,) = await run_in_threadpool(images.predict, [image], topk)
    return {one.label: one.probability for one in classes}


@app.get("/generate")
def generate(prompt: str, tokens: Annotated[int | None, fastapi.Query(ge=1)] = None, seed: int = 0) -> Response:
    return StreamingResponse(text.stream(prompt, TextOptions(tokens, seed=seed)), media_type="text/plain")
