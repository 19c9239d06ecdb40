"""An HTTP server for two trained models: classes of an image, and text that is sent while it is generated.

    pip install "dcvit[data]" fastapi uvicorn
    IMAGES=runs/W TEXT=runs/text uvicorn serve:app
    curl --data-binary @tests/data/seven.png 'localhost:8000/predict?topk=3'
    curl --no-buffer -G localhost:8000/generate --data-urlencode 'prompt=def main('

A request that does not fit its model is answered by one line and status 422.
"""

import io
import os

import fastapi
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from PIL import Image

import dcvit
from dcvit.errors import ConfigError, InputError
from dcvit.inference.texts import TextOptions

app = fastapi.FastAPI()
images, text = dcvit.load(os.environ["IMAGES"]), dcvit.load(os.environ["TEXT"])


@app.exception_handler(ConfigError)
@app.exception_handler(InputError)
@app.exception_handler(OSError)  # Pillow cannot identify the image
def refuse(request: fastapi.Request, error: Exception) -> Response:
    return PlainTextResponse(f"{error}\n", status_code=422)


@app.post("/predict")
def predict(image: bytes = fastapi.Body(), topk: int = 5) -> dict[str, float]:
    (classes,) = images.predict(Image.open(io.BytesIO(image)), topk)
    return {one.label: one.probability for one in classes}


@app.get("/generate")
def generate(prompt: str, tokens: int = 100, seed: int = 0) -> Response:
    return StreamingResponse(text.stream(prompt, TextOptions(tokens, seed=seed)), media_type="text/plain")
